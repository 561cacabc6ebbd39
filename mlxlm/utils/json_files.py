"""Read JSON of untrusted size and content, and write JSON files."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mlxlm.utils.bounded_reads import decode_utf8, open_regular, read_bytes
from mlxlm.utils.errors import CONTROLS, ConfigError, MlxlmError
from mlxlm.utils.files import write_bytes

_MAX_BYTES = 4 << 20  # parsed JSON takes 20 times that; quantization settings for thousands of layers have 1 MB
_MAX_LINE = 1 << 24  # bytes
_ESCAPED = re.compile(f"[{CONTROLS}\ud800-\udfff]")  # UTF-8 has no lone surrogates


def read_json(
    path: Path | str, max_bytes: int = _MAX_BYTES, error_type: type[MlxlmError] = ConfigError, hint: str | None = None
) -> Any:
    """Read a JSON file, or `config.json` in a folder.

    Raises:
        error_type: The file is missing, too large or not JSON; the message names it.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "config.json"
    if not os.path.exists(path):  # unlike Path.exists, False for a name that is too long
        raise error_type(f"{path} does not exist", hint or "the folder of a model or of a run")
    return parse_json(read_bytes(path, max_bytes, error_type), str(path), error_type, hint)


def read_json_object(
    path: Path, max_bytes: int, error_type: type[MlxlmError], hint: str | None = None
) -> dict[str, Any]:
    """Read a JSON file that contains an object."""
    return _check_object(read_json(path, max_bytes, error_type, hint), str(path), error_type, hint)


def read_json_lines(
    path: Path | str,
    error_type: type[MlxlmError],
    hint: str | None = None,
    advance: Callable[[int], None] = lambda _num_bytes: None,
) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield the number, from 1, the location ("FILE, line N") and the object of each line that isn't blank.

    Args:
        path: File of JSON lines.
        error_type: The error for a file that can't be read and for a line that isn't a JSON object, which it names.
        hint: The hint of that error.
        advance: Called with the number of bytes of each line.
    """
    path = Path(path)
    with open_regular(path, error_type) as file:
        for number, line in enumerate(iter(partial(file.readline, _MAX_LINE + 1), b""), start=1):
            location = f"{path}, line {number}"
            if len(line) > _MAX_LINE:
                raise error_type(f"{location} is longer than {_MAX_LINE} bytes", hint)
            advance(len(line))
            if line.strip():
                yield number, location, parse_json_object(line, location, error_type, hint)


def parse_json(
    content: bytes, name: str, error_type: type[MlxlmError], hint: str | None = None, *, strict: bool = False
) -> Any:
    """Parse JSON in UTF-8. Strings can have lone surrogates, as in any JSON.

    Args:
        content: The JSON; a byte order mark is dropped, unless `strict`.
        name: What error messages call it.
        error_type: The error for content that is not JSON.
        hint: The hint of that error.
        strict: Refuse what parsers treat differently: duplicate keys, NaN, infinities, and numbers like 1e999.
    """

    def refuse_constant(constant: str) -> None:
        raise error_type(f"{name} has {constant}, which is not a JSON value", hint)

    def finite(number: str) -> float:
        if math.isinf(value := float(number)):
            raise error_type(f"{name} has {number[:20]}, which is too large for a number", hint)
        return value

    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if len(value) < len(pairs):
            duplicate, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise error_type(f"{name} has {json.dumps(duplicate)} twice", hint)
        return value

    text = decode_utf8(content, name, error_type, hint, "utf-8" if strict else "utf-8-sig")
    try:
        if strict:
            return json.loads(
                text, parse_float=finite, parse_constant=refuse_constant, object_pairs_hook=refuse_duplicates
            )
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise error_type(f"{name} is not JSON: {error.msg} at character {error.pos + 1}", hint) from None
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, thousands of brackets
        raise error_type(f"{name} can't be read: {error}", hint) from None


def parse_json_object(
    content: bytes, name: str, error_type: type[MlxlmError], hint: str | None = None
) -> dict[str, Any]:
    """Parse a JSON object with `parse_json(strict=True)`."""
    return _check_object(parse_json(content, name, error_type, hint, strict=True), name, error_type, hint)


def without_nonfinite(value: Any) -> Any:
    """Return a JSON value in which infinities and NaN, which JSON lacks, are None."""
    if isinstance(value, dict):
        return {name: without_nonfinite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, value: Any) -> None:
    """Write or replace a JSON file atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    write_bytes(path, text.encode("utf-8"))


def json_line(value: Any) -> bytes:
    """One line of JSON in UTF-8, safe for a file, a pipe or a terminal: control characters are escaped."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return _ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text).encode("utf-8") + b"\n"


def _check_object(value: Any, name: str, error_type: type[MlxlmError], hint: str | None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise error_type(f"{name} is not a JSON object", hint)
    return value
