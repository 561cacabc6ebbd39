"""Reads of files that others made: regular files only, and no more of one than memory is meant to hold."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mlxlm.errors import MlxlmError, os_errors_as


@contextmanager
def opened(path: Path, kind: type[MlxlmError]) -> Iterator[BinaryIO]:
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
    """All of a file of at most `most` bytes. Raises `kind` for a larger one, and as `opened` does."""
    with opened(path, kind) as file:
        size = path.stat().st_size
        data = file.read(most + 1) if size <= most else b""
    if max(size, len(data)) > most:  # some files have more than they say
        raise kind(f"{path} has {max(size, len(data))} bytes, more than the {most} that are read")
    return data
