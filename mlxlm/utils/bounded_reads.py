"""Reads of untrusted files: regular files only, and no more bytes than expected."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from mlxlm.utils.errors import MlxlmError, os_errors_as
from mlxlm.utils.formatting import human_bytes


@contextmanager
def open_regular(path: Path, error_type: type[MlxlmError]) -> Iterator[BinaryIO]:
    """Open a regular file, or a link to one, for reading.

    Raises:
        error_type: The file can't be read or isn't regular: a read from a pipe or a device may never end.
    """
    with os_errors_as(error_type, "read", path):
        if not stat.S_ISREG(path.stat().st_mode):
            raise error_type(f"{path} is not a regular file")
        with path.open("rb") as file:
            yield file


def read_bytes(path: Path, max_bytes: int, error_type: type[MlxlmError]) -> bytes:
    """Read a whole file.

    Raises:
        error_type: The file has more than `max_bytes` bytes, can't be read or isn't regular.
    """
    with open_regular(path, error_type) as file:
        size = path.stat().st_size
        data = file.read(max_bytes + 1) if size <= max_bytes else b""
    size = max(size, len(data))  # files in /proc have more than their size
    if size > max_bytes:
        raise error_type(f"{path} has {human_bytes(size)}, the limit is {human_bytes(max_bytes)}")
    return data


def decode_utf8(
    content: bytes, name: str, error_type: type[MlxlmError], hint: str | None, encoding: str = "utf-8"
) -> str:
    """Decode UTF-8.

    Args:
        content: The bytes.
        name: What the error message calls them.
        error_type: The error for bytes that are not UTF-8.
        hint: The hint of that error.
        encoding: "utf-8", or "utf-8-sig" to drop a byte order mark.
    """
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        raise error_type(f"{name} is not UTF-8: {error.reason} at byte {error.start}", hint) from None
