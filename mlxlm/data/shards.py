"""Token shards: writing them with their document offsets and loss masks, and verifying them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mlxlm.data.manifest import MANIFEST_FILE, Manifest, Shard, SplitInfo
from mlxlm.utils.digests import HashingWriter, file_sha256
from mlxlm.utils.errors import DataError


class ShardWriter:
    """Writes tokens as <split>-00000.bin, ... of `shard_tokens` tokens each, the last one shorter.

    A shard with a token that is not a training target gets a loss mask, in a file of its own.

    Args:
        folder: Where to write.
        split: "train" or "validation".
        dtype: Of the tokens, little-endian.
        shard_tokens: Tokens per file.
        first: Number of the first file.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype, shard_tokens: int, first: int = 0):
        self._folder, self._split, self._dtype = folder, split, dtype
        self._shard_tokens, self._first = shard_tokens, first
        self._info = SplitInfo()
        self._document_starts = False  # with the next token
        self._open_shard()

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
            shard = self._shard
            if self._document_starts:
                self._starts.append(shard.tokens)
                self._document_starts = False
            part = np.ascontiguousarray(ids[: self._shard_tokens - shard.tokens], self._dtype)
            self._tokens.write(part.data)
            if loss_mask is not None:
                self._pad_mask()
                self._mask += loss_mask[: len(part)].astype(np.uint8).tobytes()
                loss_mask = loss_mask[len(part) :]
            shard.tokens += len(part)
            ids = ids[len(part) :]
            if shard.tokens == self._shard_tokens:
                self._close_shard()
                self._open_shard()

    def finish(self) -> SplitInfo:
        """Complete the last shard and return the size of the split."""
        if self._shard.tokens:
            self._close_shard()
        else:
            self.close()
            (self._folder / self._shard.file).unlink()
        return self._info

    def close(self) -> None:
        """Close the open file, finished or not."""
        self._file.close()

    def _open_shard(self) -> None:
        self._shard = Shard(f"{self._split}-{self._first + len(self._info.shards):05d}.bin", 0, "", "")
        self._file = open(self._folder / self._shard.file, "wb")  # noqa: SIM115 - open across calls, closed by close()
        self._tokens = HashingWriter(self._file)
        self._starts = array("q")
        self._mask = bytearray()  # of the first tokens; all others are targets

    def _close_shard(self) -> None:
        shard = self._shard
        self._file.close()
        shard.sha256 = self._tokens.hexdigest()
        shard.index_sha256 = self._write(
            shard.index_file, lambda file: np.save(file, np.frombuffer(self._starts, "<i8"))
        )
        if self._mask:
            self._pad_mask()
            shard.mask_sha256 = self._write(shard.mask_file, lambda file: file.write(self._mask))
        self._info.tokens += shard.tokens
        self._info.shards.append(shard)

    def _pad_mask(self) -> None:
        self._mask += b"\1" * (self._shard.tokens - len(self._mask))

    def _write(self, name: str, write: Callable[[Any], Any]) -> str:
        """Write a file next to the shard, and return its digest."""
        with open(self._folder / name, "wb") as file:
            writer = HashingWriter(file)
            write(writer)
        return writer.hexdigest()


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
