"""What of a text is held out for validation: decided before it is tokenized, so that a tokenizer can be trained on the
rest."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import replace

from mlxlm.data.text import Document
from mlxlm.utils.errors import DataError

FEW_DOCUMENTS = 20  # with fewer, whole documents are too coarse a unit to split by


class ValidationSplit:
    """Divides documents into those to train on and those for validation, always in the same way.

    One document out of each 1/`fraction` is held out, drawn by `seed`. Of fewer than 20 documents (or 1/`fraction`)
    it is the last `fraction` of the text instead, by its UTF-8 bytes, from the start of a line; a conversation is
    not cut.

    read: gives all documents from the first. It is called once here, to see how many there are: few are read whole.

    Attributes:
        kind: "documents", or "tail" where a document may be cut.
    """

    def __init__(self, read: Callable[[], Iterator[Document]], fraction: float, seed: int):
        self._fraction, self._seed = fraction, seed
        few = min_documents_to_split(fraction)
        with closing(read()) as documents:
            self._sizes = [_bytes(document) for document in itertools.islice(documents, few)]
        self.kind = "documents" if len(self._sizes) == few else "tail"
        total = sum(self._sizes)
        self._cut = total - max(1, round(fraction * total))

    def __call__(self, documents: Iterable[Document]) -> Iterator[tuple[bool, Document]]:
        """The same documents as `read` gives, each with whether it is held out; the one that is cut as two."""
        if self.kind == "documents":
            yield from zip(validation_draws(self._fraction, self._seed), documents, strict=False)
            return
        start = 0
        for size, document in zip(self._sizes, documents, strict=True):
            if start < self._cut < start + size and document.messages is None:
                first, rest = _divided(document.pieces, self._cut - start)
                yield False, replace(document, pieces=first, add_eos=False)
                yield True, replace(document, pieces=rest, add_bos=False)
            else:
                yield start > 0 and start + size > self._cut, document
            start += size


def check_fraction(fraction: float) -> None:
    """Raise DataError for what can't be held out."""
    if not (fraction == 0 or 1e-9 <= fraction < 1):
        raise DataError(f"validation fraction {fraction} is neither 0 nor from 1e-9 to 1", "0.05")


def min_documents_to_split(fraction: float) -> int:
    """The fewest documents of which whole ones are drawn."""
    return max(FEW_DOCUMENTS, math.ceil(1 / fraction)) if fraction else 0


def validation_draws(fraction: float, seed: int) -> Iterator[bool]:
    """For document 0, 1, ...: whether it is drawn for validation. One document, at a random place, out of each
    1/`fraction` (stratified sampling), so that no split is empty by bad luck."""
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
    """A number in [0, 1) that depends on nothing else."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def _bytes(document: Document) -> int:
    said = (content for _, content in document.messages or ())
    return sum(len(text.encode("utf-8")) for text in itertools.chain(document.pieces, said))


def _divided(pieces: Iterator[str], size: int) -> tuple[Iterator[str], Iterator[str]]:
    """The pieces before and after the last start of a line within `size` bytes, if it is in the piece that they end in;
    else before and after that character. To be read one after the other."""
    left: list[str] = []

    def first() -> Iterator[str]:
        remaining, line_ended = size, False
        for piece in pieces:
            encoded = piece.encode("utf-8")
            if len(encoded) > remaining:
                at = len(encoded[:remaining].decode("utf-8", "ignore"))
                line = piece.rfind("\n", 0, at) + 1
                if not line and not line_ended:
                    line = at
                left.append(piece[line:])
                if line:
                    yield piece[:line]
                return
            yield piece
            remaining -= len(encoded)
            line_ended = piece.endswith("\n")

    def rest() -> Iterator[str]:
        yield from left
        yield from pieces

    return first(), rest()
