"""Holds out text for validation, before it is tokenized, so that a tokenizer can be trained on the rest."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import replace

from mlxlm.data.text import Document

MIN_DOCUMENTS = 20  # with fewer, whole documents are too coarse a unit to split by


class ValidationSplit:
    """Splits documents into training and validation, deterministically.

    Holds out one document of every 1/`fraction`, drawn by `seed`. With fewer than 20 documents (or 1/`fraction`), it
    holds out the last `fraction` of the text instead, by UTF-8 bytes, from the start of a line; conversations are
    never cut.

    Args:
        preview: All documents, to see whether there are few; those are read to their end. It is closed.
        fraction: Share to hold out.
        seed: Draws the documents.

    Attributes:
        kind: "documents", or "tail" if a document can be cut.
    """

    def __init__(self, preview: Generator[Document, None, None], fraction: float, seed: int):
        self._fraction, self._seed = fraction, seed
        enough = min_documents_to_split(fraction)
        with closing(preview) as documents:
            self._sizes = [_num_bytes(document) for document in itertools.islice(documents, enough)]
        self.kind = "documents" if len(self._sizes) == enough else "tail"
        total = sum(self._sizes)
        self._tail_start = total - max(1, round(fraction * total))

    def __call__(self, documents: Iterable[Document]) -> Iterator[tuple[bool, Document]]:
        """Yield the same documents again, each with whether it is held out; a document that is cut comes as two."""
        if self.kind == "documents":
            yield from zip(validation_draws(self._fraction, self._seed), documents, strict=False)
            return
        start = 0
        for size, document in zip(self._sizes, documents, strict=True):
            if start < self._tail_start < start + size and document.messages is None:
                first, rest = _split_pieces_at(document.pieces, self._tail_start - start)
                yield False, replace(document, pieces=first, add_eos=False)
                yield True, replace(document, pieces=rest, add_bos=False)
            else:
                yield start > 0 and start + size > self._tail_start, document
            start += size


def min_documents_to_split(fraction: float) -> int:
    """Number of documents from which on whole documents are held out."""
    return max(MIN_DOCUMENTS, math.ceil(1 / fraction)) if fraction else 0


def validation_draws(fraction: float, seed: int) -> Iterator[bool]:
    """For document 0, 1, ...: whether it is held out.

    One document, at a random place, of every 1/`fraction` (stratified sampling), so that no split is empty by chance.
    """
    if not fraction:
        yield from itertools.repeat(False)
    stratum = 0
    chosen = int(_uniform(seed, 0) / fraction)
    for index in itertools.count():
        yield index == chosen
        while chosen <= index:
            stratum += 1
            chosen = int((stratum + _uniform(seed, stratum)) / fraction)


def _uniform(seed: int, index: int) -> float:
    """A pseudorandom number in [0, 1)."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _num_bytes(document: Document) -> int:
    return sum(len(text.encode("utf-8")) for text in itertools.chain(document.pieces, document.contents))


def _split_pieces_at(pieces: Iterator[str], size: int) -> tuple[Iterator[str], Iterator[str]]:
    """Split a text after about `size` bytes; read the first part before the second.

    The split is at the last line start within `size` bytes if it is in the piece where they end, else at the character.
    """
    remainder: list[str] = []

    def first() -> Iterator[str]:
        remaining, line_ended = size, False
        for piece in pieces:
            encoded = piece.encode("utf-8")
            if len(encoded) > remaining:
                at = len(encoded[:remaining].decode("utf-8", "ignore"))
                line = piece.rfind("\n", 0, at) + 1
                if not line and not line_ended:
                    line = at
                remainder.append(piece[line:])
                if line:
                    yield piece[:line]
                return
            yield piece
            remaining -= len(encoded)
            line_ended = piece.endswith("\n")

    def rest() -> Iterator[str]:
        yield from remainder
        yield from pieces

    return first(), rest()
