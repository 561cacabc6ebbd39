"""Writing tokens: shards of fixed size with their document offsets."""

from __future__ import annotations

import hashlib
from array import array
from pathlib import Path
from typing import IO

import numpy as np

from mlxlm.data.manifest import Shard, SplitInfo
from mlxlm.utils.digests import HashingWriter


class ShardWriter:
    """Writes tokens as <split>-00000.bin, ... of exactly `shard_tokens` tokens each, the last one less.

    `first` is the number of the first file. A shard with a token that is not to be learned gets a mask beside it.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int, first: int = 0):
        self._folder = folder
        self._split = split
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._first = first
        self._result = SplitInfo()
        self._file: IO[bytes] | None = None
        self._hash = hashlib.sha256()
        self._starts = array("q")
        self._tokens = 0  # in the open shard
        self._starting = False  # a document whose first ids are still to come
        self._mask: _Mask | None = None

    def add(self, ids: np.ndarray, text_bytes: int, starts_document: bool, loss_mask: np.ndarray | None = None) -> None:
        """Append `ids` (1-D), which stand for `text_bytes` bytes of text.

        loss_mask: uint8, for each whether it is to be learned as a target (1) or not (0); None: all are.
        """
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
            if loss_mask is not None:
                if self._mask is None:
                    self._mask = _Mask(self._folder / self._result.shards[-1].mask_file)
                self._mask.add(self._tokens, loss_mask[: len(part)])
                loss_mask = loss_mask[len(part) :]
            self._tokens += len(part)
            ids = ids[len(part) :]
            if self._tokens == self._shard_tokens:
                self._close_shard()

    def finish(self) -> SplitInfo:
        """Complete the last shard; returns what was written."""
        if self._file is not None:
            self._close_shard()
        return self._result

    def close(self) -> None:
        """Let go of the open files, finished or not."""
        for file in (self._file, self._mask):
            if file is not None:
                file.close()

    def _open(self) -> None:
        name = f"{self._split}-{self._first + len(self._result.shards):05d}.bin"
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
        if self._mask is not None:
            self._mask.fill(self._tokens)
            shard.mask = self._mask.finish()
            self._mask = None
        with open(self._folder / shard.index, "wb") as file:
            index = HashingWriter(file)
            np.save(index, np.frombuffer(self._starts, "<i8"))
        shard.index_sha256 = index.hexdigest()


class _Mask:
    """The mask of one shard. What was not said is to be learned."""

    def __init__(self, path: Path):
        self.path = path
        self._file = open(path, "wb")  # noqa: SIM115 - open across calls, closed by close()
        self._hash = hashlib.sha256()
        self._tokens = 0

    def add(self, start: int, loss_mask: np.ndarray) -> None:
        """The tokens from `start` on: those between them and the ones before are to be learned."""
        self.fill(start)
        self._write(np.ascontiguousarray(loss_mask, np.uint8))

    def fill(self, stop: int) -> None:
        while self._tokens < stop:
            self._write(np.ones(min(1 << 16, stop - self._tokens), np.uint8))

    def finish(self) -> str:
        """Closes the file; returns its sha256."""
        self.close()
        return self._hash.hexdigest()

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _write(self, loss_mask: np.ndarray) -> None:
        self._file.write(loss_mask.data)
        self._hash.update(loss_mask.data)
        self._tokens += len(loss_mask)
