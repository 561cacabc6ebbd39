"""SHA-256 digests of files: computed while they are written, checked when they are read again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from mlxlm.utils.bounded_reads import open_regular
from mlxlm.utils.errors import MlxlmError

_BLOCK = 1 << 20  # bytes that are read at a time


class HashingWriter:
    """A binary file that is written once, from its start to its end; `hexdigest()` is that of what was written."""

    def __init__(self, file: BinaryIO):
        self._file, self._hash = file, hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        self._hash.update(data)
        return self._file.write(data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def file_sha256(path: Path, kind: type[MlxlmError], should_stop: Callable[[], bool] = lambda: False) -> str | None:
    """The digest of a file, read block by block; None if `should_stop` said yes. Raises `kind` if it can't be read."""
    found = hashlib.sha256()
    with open_regular(path, kind) as file:
        while block := file.read(_BLOCK):
            if should_stop():
                return None
            found.update(block)
    return found.hexdigest()
