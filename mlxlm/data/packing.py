"""Rows for training out of documents, without padding: windows of the whole text, or documents fitted together."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from mlxlm.data.dataset import TokenDataset
from mlxlm.data.permutation import keys_of, permuted
from mlxlm.errors import DataError

CHAPTER = 1 << 15  # documents that are fitted together: 20 ms of work, a megabyte of tables


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
    """Rows that begin with a document and are filled with the largest that still fits; where none does, the shortest
    is cropped to the room that is left, and the row is full. A document longer than a row is cropped to it.

    The documents of an epoch, shuffled, are fitted together in chapters of up to CHAPTER, and every chapter gives as
    many rows as the first of all: one that packs into more leaves the last ones out, one that packs into fewer
    repeats its first. So a row is found by packing the lengths of one chapter, whatever comes before it, and memory is
    that of two chapters, however large the data is. Other documents are cropped in another epoch.

    `cropped` is that of the first chapter. Raises DataError where the documents don't fill one row.
    """

    def __init__(self, data: TokenDataset, length: int, seed: int, source: int = 0):
        self._starts, self._length, self._seed, self._source = data.starts, length, seed, source
        self._chapters = max(1, -(-len(self._starts) // CHAPTER))
        self._packed = lru_cache(maxsize=2)(self._pack)  # a batch may go on into the next
        first = self._packed(0, 0)
        self._rows = len(first.order)
        if not self._rows:
            problem = f"the documents of {data.name}, {len(data)} tokens, don't fill one row of {length}"
            raise DataError(problem, "a shorter sequence length, or more text")
        self.rows = self._chapters * self._rows
        self.cropped = 1 - self._rows * length / int((first.stops - first.starts).sum())

    def spans(self, row: int) -> list[Span]:
        epoch, place = divmod(row, self.rows)
        chapter, place = divmod(place, self._rows)
        packed = self._packed(epoch, chapter)
        if not len(packed.order):  # not one row in documents as short as these, next to longer ones elsewhere
            packed = self._packed(0, 0)
        return packed.spans(place % len(packed.order), self._length)

    def _pack(self, epoch: int, chapter: int) -> _Packed:
        documents = len(self._starts)
        first, stop = (n * documents // self._chapters for n in (chapter, chapter + 1))
        keys, more = keys_of(self._seed, epoch, self._source)
        numbers = permuted(np.arange(first, stop), documents, keys).astype(np.int64)
        starts, stops = self._starts.bounds(numbers)
        members, ends = fitted(stops - starts, self._length)
        order = np.random.default_rng([more, chapter]).permutation(len(ends))
        return _Packed(starts, stops, members, ends, order)


class _Packed(NamedTuple):
    """A chapter: first token and last + 1 of its documents, `fitted`, and a shuffled order of the rows."""

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


def fitted(lengths: np.ndarray, room: int) -> tuple[np.ndarray, np.ndarray]:
    """Documents of these lengths, int64 from 1 up, in rows of `room` tokens.

    Returns the indices of the documents, row after row, and where in them each row ends. A row takes the longest
    document that fits, again and again; where none does, the shortest there is, cropped: that loses least. What
    doesn't fill a row at the end is left out. Of equally long documents the last comes first.
    """
    sizes = np.minimum(lengths, room)
    by_size = np.argsort(sizes, kind="stable").tolist()
    count = np.bincount(sizes, minlength=room + 1)
    tops, count = np.cumsum(count).tolist(), count.tolist()
    there = sum(1 << size for size in np.unique(sizes).tolist())  # a bit for each size that is left
    members: list[int] = []
    ends: list[int] = []
    while there:
        left = room
        while left and there:
            fitting = there & ((2 << left) - 1)
            size = fitting.bit_length() - 1 if fitting else (there & -there).bit_length() - 1
            tops[size] -= 1
            count[size] -= 1
            if not count[size]:
                there ^= 1 << size
            members.append(by_size[tops[size]])
            left -= min(size, left)
        if not left:
            ends.append(len(members))
    return np.array(members, np.int64), np.array(ends, np.int64)
