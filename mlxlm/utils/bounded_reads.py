"""Reads of files that others made: regular files only, and no more of one than memory is meant to hold."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from mlxlm.utils.errors import MlxlmError, os_errors_as


@contextmanager
def open_regular(path: Path, kind: type[MlxlmError]) -> Iterator[BinaryIO]:
    """The file at `path`, links followed, open for reading.

    Raises `kind` if it can't be read, and for what is no regular file: a read from a pipe waits for ever, one from a
    device may never end.
    """
    with os_errors_as(kind, "read", path):
        if not stat.S_ISREG(path.stat().st_mode):
            raise kind(f"{path} is not a regular file")
        with path.open("rb") as file:
            yield file


def read_bytes(path: Path, most: int, kind: type[MlxlmError]) -> bytes:
    """All of a file of at most `most` bytes. Raises `kind` for a larger one, and as `open_regular` does."""
    with open_regular(path, kind) as file:
        size = path.stat().st_size
        data = file.read(most + 1) if size <= most else b""
    if max(size, len(data)) > most:  # some files have more than they say
        raise kind(f"{path} has {max(size, len(data))} bytes, more than the {most} that are read")
    return data


def decode_utf8(content: bytes, name: str, kind: type[MlxlmError], hint: str, encoding: str = "utf-8") -> str:
    """The text of `content`; utf-8-sig drops a byte order mark. Raises `kind` with `hint` for what is not UTF-8."""
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise kind(f"{name} is not UTF-8: {error.reason} at byte {error.start}", hint) from None


def parse_json_object(content: bytes, name: str, kind: type[MlxlmError], hint: str) -> dict[str, Any]:
    """The JSON object in `content`, in UTF-8. Raises `kind` with `hint` for what is none, and for what readers of JSON
    take differently: a name that is there twice, NaN, infinities. Texts can have lone surrogates, as JSON can."""

    def refuse(constant: str) -> None:
        raise kind(f"{name} has {constant}, which is not a JSON value", hint)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise kind(f"{name} has {json.dumps(twice)} twice", hint)
        return value

    try:
        text = decode_utf8(content, name, kind, hint)
        value = json.loads(text, parse_constant=refuse, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise kind(f"{name} is not JSON: {error.msg} at character {error.pos + 1}", hint) from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        raise kind(f"{name} can't be read: {error}", hint) from None
    if not isinstance(value, dict):
        raise kind(f"{name} is not a JSON object", hint)
    return value
