"""Rows for training out of documents: windows of the whole text, or whole documents packed together."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from mlxlm.data.dataset import TokenDataset
from mlxlm.data.permutation import permutation_keys, permute
from mlxlm.utils.errors import DataError

PACKING_BLOCK = 1 << 15  # documents that are packed together: a few milliseconds of work, a megabyte of tables


class Span(NamedTuple):
    """The tokens [start, stop). `continues`: the first of them is the last of another row, which it is a target of."""

    start: int
    stop: int
    continues: bool = False


class Packing(Protocol):
    """An endless sequence of rows of one length, epoch after epoch, as a function of (data, length, seed).

    rows: how many an epoch has.
    dropped_fraction: the share of the text's tokens that an epoch leaves out.
    padding: the share of the rows' tokens that are padding.
    """

    rows: int
    dropped_fraction: float
    padding: float

    def spans(self, row: int) -> list[Span]:
        """What row number `row` consists of; padding follows."""
        ...


class ConcatenatePacking:
    """Windows of `length` tokens of the documents one after another, in a shuffled order.

    Windows of one epoch overlap in a single token, the last target of one being the first input of the next, so that
    no target comes twice in an epoch. Each epoch cuts at other places: its windows start at a random offset below
    `length` - 1; at most 2 (`length` - 1) tokens are left out at the ends.

    Raises DataError if the data has fewer than `length` tokens.
    """

    def __init__(self, data: TokenDataset, length: int, seed: int, source: int = 0):
        step = length - 1
        if len(data) < length:
            at_most = len(data) - 1
            raise DataError(
                f"{data.name} has {len(data)} tokens, too few for sequences of {step}",
                f"a sequence length of {at_most} or less, or more text" if at_most > 0 else "more text",
            )
        self.rows = max(1, (len(data) - step) // step)
        self.dropped_fraction = 1 - (self.rows * step + 1) / len(data)
        self.padding = 0.0
        self._length = length
        self._offsets = min(step, len(data) - self.rows * step)
        self._keys = lru_cache(maxsize=2)(
            lambda epoch: permutation_keys(seed, epoch, source)
        )  # a batch may see two epochs

    def spans(self, row: int) -> list[Span]:
        epoch, place = divmod(row, self.rows)
        keys, offset = self._keys(epoch)
        window = int(permute(np.array([place]), self.rows, keys)[0])
        start = offset % self._offsets + window * (self._length - 1)
        return [Span(start, start + self._length)]


class BestFitPacking:
    """Rows of whole documents, the longest that fits into what is left of a row next to the others, and padding.

    A document longer than a row is split into pieces of a row each, which overlap in a single token as the windows of
    `ConcatenatePacking` do; the last piece is packed as a short document is. So every document that fits a row is whole in
    exactly one row of an epoch, and every token that has another before it in its document is a target exactly once
    (Ding et al., "Fewer Truncations Improve Language Modeling", 2024).

    Documents are packed in chapters of up to CHAPTER, whose members are drawn by the seed and stay the same. How a
    chapter is packed depends on the lengths of its documents alone (see `first_fit_decreasing`), so that a row is found by packing
    one chapter, whatever comes before it, and memory is that of two chapters, however large the data is. Each epoch
    draws anew the order of the rows, that of the documents in a row, and which of the documents of a length meet.

    Raises DataError where there are no documents.
    """

    dropped_fraction = 0.0

    def __init__(self, data: TokenDataset, length: int, seed: int, source: int = 0):
        self._starts, self._length, self._seed, self._source = data.starts, length, seed, source
        if not len(self._starts):
            raise DataError(f"{data.name} has no documents", "more text")
        self._members, _ = permutation_keys(seed, source)
        self._count = -(-len(self._starts) // PACKING_BLOCK)
        self._chapter = lru_cache(maxsize=2)(self._packed)  # a batch may go on into the next
        self._drawn = lru_cache(maxsize=2)(self._draw)
        rows, tokens = [], 0
        for chapter in map(self._packed, range(self._count)):
            rows.append(chapter.rows)
            tokens += chapter.tokens(length)
        self._ends = np.cumsum(rows)  # rows up to the end of each chapter
        self.rows = int(self._ends[-1])
        self.padding = 1 - tokens / (self.rows * length)

    def spans(self, row: int) -> list[Span]:
        epoch, place = divmod(row, self.rows)
        number = int(np.searchsorted(self._ends, place, side="right"))
        place -= int(self._ends[number - 1]) if number else 0
        chapter, (keys, by_size) = self._chapter(number), self._drawn(epoch, number)
        place = int(permute(np.array([place]), chapter.rows, keys)[0])
        found = chapter.spans(place, by_size, self._length)
        if len(found) == 1:
            return found
        order = np.random.default_rng([self._seed, self._source, epoch, number, place]).permutation(len(found))
        return [found[i] for i in order]

    def _packed(self, chapter: int) -> _Chapter:
        documents = len(self._starts)
        first, stop = (n * documents // self._count for n in (chapter, chapter + 1))
        members = permute(np.arange(first, stop), documents, self._members).astype(np.int64)
        starts, stops = self._starts.bounds(members)
        step = self._length - 1
        whole = (stops - starts - 1) // step
        rests = stops - starts - whole * step
        rests[(rests == 1) & (whole > 0)] = 0  # that token is the last of the piece before
        patterns = first_fit_decreasing(np.bincount(rests, minlength=self._length + 1))
        return _Chapter(starts, stops, np.cumsum(whole), rests, patterns, np.cumsum([p.repeats for p in patterns]))

    def _draw(self, epoch: int, chapter: int) -> tuple[tuple[np.ndarray, int], np.ndarray]:
        """The keys of the order of the rows, and the documents of a chapter by the length of their last piece."""
        rests = self._chapter(chapter).rests
        order = np.random.default_rng([self._seed, self._source, epoch, chapter]).permutation(len(rests))
        by_size = order[np.argsort(rests[order], kind="stable")]
        return permutation_keys(self._seed, self._source, epoch, chapter)[0], by_size


class _Chapter(NamedTuple):
    """First token and last + 1 of each document, its pieces that fill a row and those of the documents before, and the
    length of what these leave of it; how the rests are packed, with the rows up to the end of each pattern."""

    starts: np.ndarray
    stops: np.ndarray
    whole: np.ndarray
    rests: np.ndarray
    patterns: list[RowPattern]
    ends: np.ndarray

    @property
    def rows(self) -> int:
        return int(self.whole[-1]) + (int(self.ends[-1]) if len(self.ends) else 0)

    def tokens(self, length: int) -> int:
        return int(self.whole[-1]) * length + int(self.rests.sum())

    def spans(self, row: int, by_size: np.ndarray, length: int) -> list[Span]:
        """Rows that one piece fills come first, then the packed ones."""
        if row < self.whole[-1]:
            document = int(np.searchsorted(self.whole, row, side="right"))
            before = int(self.whole[document - 1]) if document else 0
            start = int(self.starts[document]) + (row - before) * (length - 1)
            return [Span(start, start + length, row > before)]
        row -= int(self.whole[-1])
        number = int(np.searchsorted(self.ends, row, side="right"))
        pattern = self.patterns[number]
        repeat = row - (int(self.ends[number - 1]) if number else 0)
        found = []
        for size, count, first in zip(pattern.sizes, pattern.counts, pattern.firsts, strict=True):
            first += repeat * count
            for document in by_size[first : first + count]:
                stop = int(self.stops[document])
                found.append(Span(stop - size, stop, stop - size != self.starts[document]))
        return found


class RowPattern(NamedTuple):
    """Some rows alike: each has `counts` documents of `sizes` tokens, the first row those from place `firsts` on of all
    documents ordered by size. `repeats`: how many rows."""

    sizes: list[int]
    counts: list[int]
    firsts: list[int]
    repeats: int


def first_fit_decreasing(counts: np.ndarray) -> list[RowPattern]:
    """Rows of documents, of which there are `counts[n]` of n tokens, n up to the length of a row; those of 0 are left
    out. A row takes the longest document that is left, then the longest that fits, again and again: first-fit
    decreasing, which takes at most 11/9 of the fewest rows possible, and one (Johnson et al., 1974)."""
    room = len(counts) - 1
    left = counts.tolist()
    firsts = np.cumsum([0, *left[:-1]]).tolist()
    there = sum(1 << size for size in range(1, room + 1) if left[size])  # a bit for each size that is left
    patterns: list[RowPattern] = []
    while there:
        sizes, taken, free, fitting = [], [], room, there
        while fitting := fitting & ((2 << free) - 1):
            size = fitting.bit_length() - 1
            sizes.append(size)
            taken.append(min(left[size], free // size))
            free -= size * taken[-1]
            fitting ^= 1 << size
        repeats = min(left[size] // count for size, count in zip(sizes, taken, strict=True))
        patterns.append(RowPattern(sizes, taken, [firsts[size] for size in sizes], repeats))
        for size, count in zip(sizes, taken, strict=True):
            left[size] -= count * repeats
            firsts[size] += count * repeats
            if not left[size]:
                there ^= 1 << size
    return patterns
