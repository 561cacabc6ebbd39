"""Writing tokens: shards of fixed size with their document offsets, and a staging file."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from mlxlm.data.manifest import Shard, Split


class ShardWriter:
    """Writes one split as <split>-00000.bin, ... of exactly `shard_tokens` tokens each, the last one less."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int):
        self._folder = folder
        self._split = split
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._result = Split()
        self._file: IO[bytes] | None = None
        self._hash = hashlib.sha256()
        self._starts = array("q")
        self._tokens = 0  # in the open shard
        self._starting = False  # a document whose first ids are still to come

    def add(self, ids: np.ndarray, text_bytes: int, starts_document: bool) -> None:
        """Append `ids` (1-D), which stand for `text_bytes` bytes of text."""
        self._result.bytes += text_bytes
        self._result.documents += starts_document
        self._starting |= starts_document
        while len(ids):
            if self._file is None:
                self._open()
            if self._starting:
                self._starts.append(self._tokens)
                self._starting = False
            part = np.ascontiguousarray(ids[: self._shard_tokens - self._tokens], self._dtype)
            self._file.write(part.data)
            self._hash.update(part.data)
            self._tokens += len(part)
            ids = ids[len(part) :]
            if self._tokens == self._shard_tokens:
                self._close_shard()

    def finish(self) -> Split:
        """Complete the last shard; returns what was written."""
        if self._file is not None:
            self._close_shard()
        return self._result

    def close(self) -> None:
        """Let go of the open file, finished or not."""
        if self._file is not None:
            self._file.close()

    def _open(self) -> None:
        name = f"{self._split}-{len(self._result.shards):05d}.bin"
        self._file = open(self._folder / name, "wb")  # noqa: SIM115 - open across calls, closed by close()
        self._hash = hashlib.sha256()
        self._starts = array("q")
        self._tokens = 0
        self._result.shards.append(Shard(name, 0, ""))

    def _close_shard(self) -> None:
        shard = self._result.shards[-1]
        shard.tokens = self._tokens
        shard.sha256 = self._hash.hexdigest()
        self._result.tokens += self._tokens
        self._file.close()
        self._file = None
        with open(self._folder / shard.index, "wb") as file:
            np.save(file, np.frombuffer(self._starts, "<i8"))


class Staging:
    """Documents kept on disk until it is known which split they belong to. Meant for few, large documents."""

    def __init__(self, path: Path, dtype: np.dtype):
        self._path = path
        self._dtype = dtype
        self._file = open(path, "wb")  # noqa: SIM115 - open across calls, closed by close()
        self._starts: list[int] = []
        self._bytes: list[int] = []
        self.tokens = 0

    def add(self, ids: np.ndarray, text_bytes: int, starts_document: bool) -> None:
        if starts_document:
            self._starts.append(self.tokens)
            self._bytes.append(0)
        self._file.write(np.ascontiguousarray(ids, self._dtype).data)
        self._bytes[-1] += text_bytes
        self.tokens += len(ids)

    def documents(self) -> Iterator[tuple[int, np.ndarray, int]]:
        """Every document: its offset, its ids (a view of the file) and its bytes of text."""
        if not self.tokens:
            return
        self._file.flush()
        ids = np.memmap(self._path, self._dtype, mode="r")
        ends = [*self._starts[1:], self.tokens]
        for start, end, text_bytes in zip(self._starts, ends, self._bytes, strict=True):
            yield start, ids[start:end], text_bytes

    def close(self) -> None:
        """Delete the file."""
        self._file.close()
        self._path.unlink(missing_ok=True)
