"""Rows for training out of documents, without padding: windows of the whole text, or documents fitted together."""

from __future__ import annotations

from functools import lru_cache
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np

from mlxlm.data.dataset import TokenDataset
from mlxlm.data.permutation import keys_of, permuted
from mlxlm.errors import DataError

CHAPTER = 1 << 15  # documents that are fitted together: 40 ms of work, a megabyte of tables
# What is cropped is the shortest of so many: of all, it would be the same few in every epoch, and of one, three times
# as much is lost (0.5% of 32,768 documents, lognormal around 150 tokens, in rows of 513; of all 0.3%, of one 1.6%).
_HAND = 8


Span = tuple[int, int]  # the tokens [start, stop)


class Packing(Protocol):
    """An endless sequence of rows of one length, epoch after epoch, as a function of (data, length, seed).

    rows: how many an epoch has.
    cropped: the share of its tokens that an epoch leaves out.
    """

    rows: int
    cropped: float

    def spans(self, row: int) -> list[Span]:
        """What row number `row` consists of."""
        ...


class Concatenated:
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
        self.cropped = 1 - (self.rows * step + 1) / len(data)
        self._length = length
        self._offsets = min(step, len(data) - self.rows * step)
        self._keys = lru_cache(maxsize=2)(lambda epoch: keys_of(seed, epoch, source))  # a batch may see two epochs

    def spans(self, row: int) -> list[Span]:
        epoch, place = divmod(row, self.rows)
        keys, offset = self._keys(epoch)
        window = int(permuted(np.array([place]), self.rows, keys)[0])
        start = offset % self._offsets + window * (self._length - 1)
        return [(start, start + self._length)]


class BestFit:
    """Rows that begin with a document and are filled with the largest that still fits; where none does, with the
    beginning of another. A document longer than a row is cropped to it. See `fitted`.

    Documents are fitted together in chapters of up to CHAPTER, whose members are drawn by the seed and stay the same.
    Every epoch packs them in another order, drawn by its number: other documents meet, and others are cropped. A
    chapter has as many rows in each as its tokens fill, so that a row is found by packing one chapter, whatever comes
    before it, and memory is that of two chapters, however large the data is. Every epoch has each document at least
    once; what cropping leaves of the last rows is filled with documents of the chapter again.

    `cropped` is that of the first chapter in the first epoch. Raises DataError where there are no documents.
    """

    def __init__(self, data: TokenDataset, length: int, seed: int, source: int = 0):
        self._starts, self._length, self._seed, self._source = data.starts, length, seed, source
        self._members, _ = keys_of(seed, source)
        self._chapters = max(1, -(-len(self._starts) // CHAPTER))
        self._packed = lru_cache(maxsize=2)(self._pack)  # a batch may go on into the next
        sizes = [np.minimum(stops - starts, length).sum() for starts, stops in map(self._bounds, range(self._chapters))]
        self._ends = np.cumsum([-(-int(size) // length) for size in sizes])  # rows up to the end of each chapter
        self.rows = int(self._ends[-1])
        if not self.rows:
            raise DataError(f"{data.name} has no documents", "more text")
        self.cropped = self._packed(0, 0).cropped(length)

    def spans(self, row: int) -> list[Span]:
        epoch, place = divmod(row, self.rows)
        chapter = int(np.searchsorted(self._ends, place, side="right"))
        before = int(self._ends[chapter - 1]) if chapter else 0
        return self._packed(epoch, chapter).spans(place - before, self._length)

    def _bounds(self, chapter: int) -> tuple[np.ndarray, np.ndarray]:
        """First token and last + 1 of the documents of a chapter."""
        documents = len(self._starts)
        first, stop = (n * documents // self._chapters for n in (chapter, chapter + 1))
        return self._starts.bounds(permuted(np.arange(first, stop), documents, self._members).astype(np.int64))

    def _pack(self, epoch: int, chapter: int) -> _Packed:
        starts, stops = self._bounds(chapter)
        draw = np.random.default_rng([self._seed, self._source, epoch, chapter])
        members, ends = fitted(stops - starts, self._length, draw.permutation(len(starts)))
        return _Packed(starts, stops, members, ends, draw.permutation(len(ends)))


class _Packed(NamedTuple):
    """A chapter: first token and last + 1 of its documents, what `fitted` says, and a shuffled order of the rows."""

    starts: np.ndarray
    stops: np.ndarray
    members: np.ndarray
    ends: np.ndarray
    order: np.ndarray

    def spans(self, place: int, room: int) -> list[Span]:
        row = self.order[place]
        found = []
        for i in self.members[self.ends[row - 1] if row else 0 : self.ends[row]]:
            start, stop = int(self.starts[i]), int(self.stops[i])
            found.append((start, min(stop, start + room)))
            room -= found[-1][1] - start
        return found

    def cropped(self, room: int) -> float:
        """The share of the tokens that are in no row."""
        lengths = self.stops - self.starts
        shown = np.minimum(lengths, room)[self.members]
        shown[self.ends - 1] -= np.add.reduceat(shown, [0, *self.ends[:-1]]) - room  # the last of each row
        seen = np.zeros(len(lengths), np.int64)
        np.maximum.at(seen, self.members, shown)
        return 1 - int(seen.sum()) / int(lengths.sum())


def fitted(lengths: np.ndarray, room: int, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Documents of these lengths, int64 from 1 up, in as many rows of `room` tokens as they fill, the last one too.

    Returns the indices of the documents, row after row, and where in them each row ends. A row takes the next document
    of `order`, a permutation, then the longest that fits, again and again; where none does, the shortest of the next
    _HAND in the order, cropped. When all have been taken, all are there again: cropping leaves room for a few of them.
    """
    sizes = np.minimum(lengths, room)
    rows = -(-int(sizes.sum()) // room)
    by_size = order[np.argsort(sizes[order], kind="stable")].tolist()
    counts = np.bincount(sizes, minlength=room + 1)
    there = 0  # a bit for each size that is left
    of = sizes.tolist()
    members: list[int] = []
    ends: list[int] = []
    while len(ends) < rows:
        left = room
        while left:
            if not there:
                there = sum(1 << size for size in np.flatnonzero(counts).tolist())
                tops, count = np.cumsum(counts).tolist(), counts.tolist()
                taken, coming, hand = bytearray(len(of)), iter(order.tolist()), []
            if left < room and (fitting := there & ((2 << left) - 1)):
                size = fitting.bit_length() - 1
                tops[size] -= 1
                while taken[by_size[tops[size]]]:
                    tops[size] -= 1
                chosen = by_size[tops[size]]
            else:
                hand = [i for i in hand if not taken[i]]
                hand += islice((i for i in coming if not taken[i]), _HAND - len(hand))
                chosen = hand[0] if left == room else min(hand, key=of.__getitem__)
            taken[chosen] = True
            count[of[chosen]] -= 1
            if not count[of[chosen]]:
                there ^= 1 << of[chosen]
            members.append(chosen)
            left -= min(of[chosen], left)
        ends.append(len(members))
    return np.array(members, np.int64), np.array(ends, np.int64)
