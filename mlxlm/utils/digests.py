"""SHA-256 digests of files, computed during a write or from a file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from mlxlm.utils.bounded_reads import open_regular
from mlxlm.utils.errors import MlxlmError

_BLOCK = 1 << 20  # bytes per read


class HashingWriter:
    """Writes a binary file sequentially and computes its digest."""

    def __init__(self, file: BinaryIO):
        self._file, self._hash = file, hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        """Write `data` and return its length."""
        self._hash.update(data)
        return self._file.write(data)

    def hexdigest(self) -> str:
        """SHA-256 of what was written so far."""
        return self._hash.hexdigest()


def file_sha256(
    path: Path, error_type: type[MlxlmError], should_stop: Callable[[], bool] = lambda: False
) -> str | None:
    """SHA-256 of a file in hexadecimal; None if `should_stop` returned True.

    Raises:
        error_type: The file can't be read.
    """
    digest = hashlib.sha256()
    with open_regular(path, error_type) as file:
        while block := file.read(_BLOCK):
            if should_stop():
                return None
            digest.update(block)
    return digest.hexdigest()
