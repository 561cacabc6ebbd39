"""Deduplication: leaves out documents that repeat an earlier one, exactly or nearly."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from tempfile import TemporaryFile
from typing import IO, Any

from mlxlm.data.manifest import DedupStats
from mlxlm.data.minhash import MinHash, MinHashLSH
from mlxlm.data.text import Document
from mlxlm.utils.errors import DataError, os_errors_as

_MAX_BUFFERED = 1 << 24  # characters of the current document in memory; longer ones are buffered on disk


class DuplicateFilter:
    """Filters out duplicates: `for document in duplicate_filter(documents)`; can be called for several sources in turn.

    Of similar documents the first stays. They are compared by the sets of their five-word shingles, ignoring case and
    punctuation; the Jaccard similarity is estimated with a standard deviation of 0.04, see `mlxlm.data.minhash`.
    Exact duplicates are always found; with a threshold of 1, nothing else is. Memory: about 1 kB for each document that
    stays, whatever its length, and up to 64 MB of the current document.

    Args:
        threshold: Jaccard similarity from which on a document is a duplicate, above 0 and at most 1.

    Attributes:
        stats: What was left out so far.
    """

    def __init__(self, threshold: float):
        self.stats = DedupStats(threshold)
        self._index = MinHashLSH(threshold)

    def __call__(self, documents: Iterable[Document]) -> Generator[Document, None, None]:
        """Yield the documents that repeat no earlier one."""
        for document in documents:
            with ExitStack() as stack:
                minhash, digest, size = MinHash(), hashlib.blake2b(digest_size=8), 0
                buffer = _PieceBuffer(stack)
                for piece in document.pieces:
                    buffer.add(piece)
                    size += _update(piece, minhash, digest)
                if document.messages is not None:
                    fields = [document.messages, document.tools]
                    digest.update(json.dumps(fields, sort_keys=True, default=str).encode())
                for message in document.messages or ():
                    size += _update(message["content"], minhash, digest)
                    minhash.add(" ")
                duplicate = self._index.add(minhash.signature(digest.digest()), digest.digest())
                self.stats.documents += 1
                if duplicate is None:
                    yield replace(document, pieces=buffer.pieces())
                    continue
                self.stats.exact += duplicate == "exact"
                self.stats.near += duplicate == "near"
                self.stats.bytes += size


def _update(text: str, minhash: MinHash, digest: Any) -> int:
    """Add a part of a document to its MinHash and digest; returns its size in bytes."""
    content = text.encode("utf-8")
    digest.update(content)
    minhash.add(text)
    return len(content)


class _PieceBuffer:
    """The pieces of a document, to read again: in memory, or in a temporary file if there are many."""

    def __init__(self, stack: ExitStack):
        self._stack = stack
        self._pieces: list[str] = []
        self._size = 0
        self._file: IO[bytes] | None = None

    def add(self, piece: str) -> None:
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > _MAX_BUFFERED:
            with os_errors_as(DataError, "write", "a temporary file"):
                if self._file is None:
                    self._file = self._stack.enter_context(TemporaryFile())  # noqa: SIM115
                for buffered in self._pieces:
                    content = buffered.encode("utf-8")
                    self._file.write(len(content).to_bytes(4, "little") + content)
            self._pieces, self._size = [], 0

    def pieces(self) -> Iterator[str]:
        if self._file is not None:
            self._file.seek(0)
            while length := self._file.read(4):
                yield self._file.read(int.from_bytes(length, "little")).decode("utf-8")
        yield from self._pieces
