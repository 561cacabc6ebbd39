"""Leaving out documents that repeat an earlier one, to the byte or nearly."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from tempfile import TemporaryFile
from typing import IO

from mlxlm.data.manifest import DedupStats
from mlxlm.data.minhash import MinHash, MinHashLSH
from mlxlm.data.text import Document
from mlxlm.utils.errors import DataError, os_errors_as

_HELD = 1 << 24  # characters of one document that wait in memory until it is decided; more of it wait on disk


class DuplicateFilter:
    """Lets through what was not there before: `filter(documents)`, of any number of sources one after another.

    Of documents alike the first stays. They are compared by the sets of their runs of five words, without case and
    punctuation, and how similar these are is estimated, with a standard deviation of 0.04: see `mlxlm.data.minhash`.
    A repetition to the byte is always found; with a threshold of 1 nothing else is. Memory: about a kilobyte for each
    document that stays, whatever its length, and up to 64 MB of the document that is read.

    Attributes:
        found: what was left out so far.
    """

    def __init__(self, threshold: float):
        """threshold: the Jaccard similarity from which on a document counts as a duplicate, above 0 and at most 1."""
        self.found = DedupStats(threshold)
        self._index = MinHashLSH(threshold)

    def __call__(self, documents: Iterable[Document]) -> Iterator[Document]:
        for document in documents:
            with ExitStack() as stack:
                shingles, digest, size = MinHash(), hashlib.blake2b(digest_size=8), 0
                held = _Held(stack)
                for piece in document.pieces:
                    held.add(piece)
                    size += _read(piece, shingles, digest)
                for role, content in document.messages or ():
                    # Their lengths keep apart what a plain join could make alike.
                    digest.update(f"{len(role)},{len(content)},{role}".encode())
                    size += _read(content, shingles, digest)
                    shingles.add(" ")
                same = self._index.add(shingles.min_hashes(digest.digest()), digest.digest())
                self.found.documents += 1
                if same is None:
                    yield replace(document, pieces=held.pieces())
                    continue
                self.found.exact += same
                self.found.near += not same
                self.found.bytes += size


def _read(text: str, shingles: MinHash, digest) -> int:
    """Takes in a part of a document; returns its size in bytes."""
    content = text.encode("utf-8")
    digest.update(content)
    shingles.add(text)
    return len(content)


class _Held:
    """The pieces of a document, to be read again."""

    def __init__(self, stack: ExitStack):
        self._stack = stack
        self._pieces: list[str] = []
        self._size = 0
        self._file: IO[bytes] | None = None

    def add(self, piece: str) -> None:
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > _HELD:
            with os_errors_as(DataError, "write", "a temporary file"):
                if self._file is None:
                    self._file = self._stack.enter_context(TemporaryFile())  # noqa: SIM115
                for held in self._pieces:
                    content = held.encode("utf-8")
                    self._file.write(len(content).to_bytes(4, "little") + content)
            self._pieces, self._size = [], 0

    def pieces(self) -> Iterator[str]:
        if self._file is not None:
            self._file.seek(0)
            while length := self._file.read(4):
                yield self._file.read(int.from_bytes(length, "little")).decode("utf-8")
        yield from self._pieces
