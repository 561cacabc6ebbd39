"""Token shards: writing them with their document offsets and loss masks, and verifying them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np

from mlxlm.data.manifest import MANIFEST_FILE, Manifest, Shard, SplitInfo
from mlxlm.utils.digests import HashingWriter, file_sha256
from mlxlm.utils.errors import DataError

_MASK_CHUNK = 1 << 16  # tokens


class ShardWriter:
    """Writes tokens as <split>-00000.bin, ... of `shard_tokens` tokens each, the last one shorter.

    A shard with a token that is not a training target gets a loss mask beside it.

    Args:
        folder: Where to write.
        split: "train" or "validation".
        dtype: Of the tokens, little-endian.
        shard_tokens: Tokens per file.
        first: Number of the first file.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int, first: int = 0):
        self._folder = folder
        self._split = split
        self._dtype = dtype
        self._shard_tokens = shard_tokens
        self._first = first
        self._info = SplitInfo()
        self._file: IO[bytes] | None = None
        self._hash = hashlib.sha256()
        self._starts = array("q")
        self._tokens = 0  # in the open shard
        self._document_starts = False  # with the next token
        self._mask: _MaskWriter | None = None

    def add(self, ids: np.ndarray, text_bytes: int, starts_document: bool, loss_mask: np.ndarray | None = None) -> None:
        """Append tokens.

        Args:
            ids: Token ids `[N]`.
            text_bytes: UTF-8 size of the text that they stand for.
            starts_document: Whether the first of them starts a document.
            loss_mask: uint8 `[N]`, 1 for training targets; None: all are targets.
        """
        self._info.bytes += text_bytes
        self._info.documents += starts_document
        self._document_starts |= starts_document
        while len(ids):
            if self._file is None:
                self._open_shard()
            if self._document_starts:
                self._starts.append(self._tokens)
                self._document_starts = False
            part = np.ascontiguousarray(ids[: self._shard_tokens - self._tokens], self._dtype)
            self._file.write(part.data)
            self._hash.update(part.data)
            if loss_mask is not None:
                if self._mask is None:
                    self._mask = _MaskWriter(self._folder / self._info.shards[-1].mask_file)
                self._mask.add(self._tokens, loss_mask[: len(part)])
                loss_mask = loss_mask[len(part) :]
            self._tokens += len(part)
            ids = ids[len(part) :]
            if self._tokens == self._shard_tokens:
                self._close_shard()

    def finish(self) -> SplitInfo:
        """Complete the last shard and return the size of the split."""
        if self._file is not None:
            self._close_shard()
        return self._info

    def close(self) -> None:
        """Close the open files, finished or not."""
        for file in (self._file, self._mask):
            if file is not None:
                file.close()

    def _open_shard(self) -> None:
        name = f"{self._split}-{self._first + len(self._info.shards):05d}.bin"
        self._file = open(self._folder / name, "wb")  # noqa: SIM115 - open across calls, closed by close()
        self._hash = hashlib.sha256()
        self._starts = array("q")
        self._tokens = 0
        self._info.shards.append(Shard(name, 0, ""))

    def _close_shard(self) -> None:
        shard = self._info.shards[-1]
        shard.tokens = self._tokens
        shard.sha256 = self._hash.hexdigest()
        self._info.tokens += self._tokens
        self._file.close()
        self._file = None
        if self._mask is not None:
            self._mask.pad(self._tokens)
            self._mask.close()
            shard.mask_sha256 = self._mask.hexdigest()
            self._mask = None
        with open(self._folder / shard.index_file, "wb") as file:
            index = HashingWriter(file)
            np.save(index, np.frombuffer(self._starts, "<i8"))
        shard.index_sha256 = index.hexdigest()


class _MaskWriter:
    """Writes the loss mask of one shard. Tokens that are never added are targets."""

    def __init__(self, path: Path):
        self._file = open(path, "wb")  # noqa: SIM115 - open across calls, closed by close()
        self._hash = hashlib.sha256()
        self._tokens = 0

    def add(self, start: int, loss_mask: np.ndarray) -> None:
        """Write the mask of the tokens from `start` on."""
        self.pad(start)
        self._write(np.ascontiguousarray(loss_mask, np.uint8))

    def pad(self, stop: int) -> None:
        """Make all tokens up to `stop` targets."""
        while self._tokens < stop:
            self._write(np.ones(min(_MASK_CHUNK, stop - self._tokens), np.uint8))

    def hexdigest(self) -> str:
        return self._hash.hexdigest()

    def close(self) -> None:
        self._file.close()

    def _write(self, loss_mask: np.ndarray) -> None:
        self._file.write(loss_mask.data)
        self._hash.update(loss_mask.data)
        self._tokens += len(loss_mask)


def verify_shards(folder: Path, should_stop: Callable[[], bool] = lambda: False) -> None:
    """Compare every file of every shard with its digest in the manifest, reading a megabyte at a time.

    Returns early, without an error, once `should_stop` returns True.

    Raises:
        DataError: A file has changed or can't be read; the message names it.
    """
    manifest = Manifest.read(folder)
    for shard in (*manifest.train.shards, *manifest.validation.shards):
        for name, expected in shard.digests.items():
            actual = file_sha256(folder / name, DataError, should_stop)
            if actual is None:
                return
            if actual != expected:
                problem = f"{folder / name} has changed: its SHA-256 is not the one in {MANIFEST_FILE}"
                raise DataError(problem, "an unchanged copy of this file, or preparing the data again for a new run")
