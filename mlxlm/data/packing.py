"""Packs documents into training rows: windows of the concatenated text, or whole documents by best fit.

Rows and documents are shuffled without tables, by keyed permutations that are computed one element at a time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np

from mlxlm.data.dataset import TokenDataset
from mlxlm.utils.errors import DataError

PACKING_BLOCK = 1 << 15  # documents that are packed together: a few milliseconds of work, a megabyte of tables


class Span(NamedTuple):
    """The tokens [start, stop). `continues`: the first of them is a target in another row, as that row's last token."""

    start: int
    stop: int
    continues: bool = False


class Packing(Protocol):
    """An endless sequence of rows of one length, epoch after epoch, as a function of (data, length, seed).

    Attributes:
        rows: Rows per epoch.
        dropped_fraction: Share of the text's tokens that an epoch leaves out.
        padding: Share of the rows' tokens that are padding.
    """

    rows: int
    dropped_fraction: float
    padding: float

    def spans(self, row: int) -> list[Span]:
        """The tokens of a row, before its padding."""
        ...


class ConcatenatePacking:
    """Windows of `length` tokens of the concatenated documents, in a shuffled order.

    Consecutive windows overlap in one token, the last target of one being the first input of the next, so that no token
    is a target twice in an epoch. The windows of each epoch start at another random offset below `length` - 1; at most
    2 (`length` - 1) tokens are left out at the ends.

    Raises:
        DataError: The data has fewer than `length` tokens.
    """

    def __init__(self, data: TokenDataset, length: int, seed: int, source: int = 0):
        step = length - 1
        if len(data) < length:
            longest = len(data) - 1
            raise DataError(
                f"{data.name} has {len(data)} tokens, too few for sequences of {step}",
                f"a sequence length of {longest} or less, or more text" if longest > 0 else "more text",
            )
        self.rows = max(1, (len(data) - step) // step)
        self.dropped_fraction = 1 - (self.rows * step + 1) / len(data)
        self.padding = 0.0
        self._length = length
        self._offsets = min(step, len(data) - self.rows * step)
        # Two: a batch can span two epochs.
        self._keys = lru_cache(maxsize=2)(lambda epoch: permutation_keys(seed, epoch, source))

    def spans(self, row: int) -> list[Span]:
        """The window of a row."""
        epoch, index = divmod(row, self.rows)
        keys, offset = self._keys(epoch)
        window = int(permute(np.array([index]), self.rows, keys)[0])
        start = offset % self._offsets + window * (self._length - 1)
        return [Span(start, start + self._length)]


class BestFitPacking:
    """Rows of whole documents, packed by best fit, and padding.

    A document longer than a row is split into pieces of one row each, which overlap in one token like the windows of
    `ConcatenatePacking`; its last piece is packed like a short document. So a document that fits a row is whole in
    exactly one row of an epoch, and every token with another before it in its document is a target exactly once (Ding
    et al., "Fewer Truncations Improve Language Modeling", 2024).

    Documents are packed in blocks of up to `PACKING_BLOCK`, whose members are drawn by the seed and stay the same. How
    a block is packed depends on the lengths of its documents alone (see `first_fit_decreasing`), so finding any row
    takes packing one block, and memory is that of two blocks, however large the data is. Each epoch draws again the
    order of the rows, the order of the documents in a row, and which documents of the same length share a row.

    Raises:
        DataError: There are no documents.
    """

    dropped_fraction = 0.0

    def __init__(self, data: TokenDataset, length: int, seed: int, source: int = 0):
        self._starts, self._length, self._seed, self._source = data.starts, length, seed, source
        if not len(self._starts):
            raise DataError(f"{data.name} has no documents", "more text")
        self._member_keys, _ = permutation_keys(seed, source)
        self._num_blocks = -(-len(self._starts) // PACKING_BLOCK)
        self._block = lru_cache(maxsize=2)(self._pack_block)  # two: a batch can span two blocks
        self._order = lru_cache(maxsize=2)(self._draw_order)
        rows, tokens = [], 0
        for block in map(self._pack_block, range(self._num_blocks)):
            rows.append(block.rows)
            tokens += block.num_tokens(length)
        self._ends = np.cumsum(rows)  # rows up to the end of each block
        self.rows = int(self._ends[-1])
        self.padding = 1 - tokens / (self.rows * length)

    def spans(self, row: int) -> list[Span]:
        """The documents of a row, in a random order."""
        epoch, index = divmod(row, self.rows)
        number = int(np.searchsorted(self._ends, index, side="right"))
        index -= int(self._ends[number - 1]) if number else 0
        block, (keys, by_size) = self._block(number), self._order(epoch, number)
        index = int(permute(np.array([index]), block.rows, keys)[0])
        spans = block.spans(index, by_size, self._length)
        if len(spans) == 1:
            return spans
        order = np.random.default_rng([self._seed, self._source, epoch, number, index]).permutation(len(spans))
        return [spans[i] for i in order]

    def _pack_block(self, block: int) -> _PackedBlock:
        documents = len(self._starts)
        first, stop = (n * documents // self._num_blocks for n in (block, block + 1))
        members = permute(np.arange(first, stop), documents, self._member_keys).astype(np.int64)
        starts, stops = self._starts.bounds(members)
        step = self._length - 1
        full = (stops - starts - 1) // step
        rest = stops - starts - full * step
        rest[(rest == 1) & (full > 0)] = 0  # that token is the last of the piece before
        patterns = first_fit_decreasing(np.bincount(rest, minlength=self._length + 1))
        return _PackedBlock(starts, stops, np.cumsum(full), rest, patterns, np.cumsum([p.repeats for p in patterns]))

    def _draw_order(self, epoch: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys for the order of the rows of a block, and its documents by the length of their last piece."""
        rest = self._block(block).rest
        order = np.random.default_rng([self._seed, self._source, epoch, block]).permutation(len(rest))
        by_size = order[np.argsort(rest[order], kind="stable")]
        return permutation_keys(self._seed, self._source, epoch, block)[0], by_size


class _PackedBlock(NamedTuple):
    """The rows of a block of documents.

    Attributes:
        starts, stops: First token and end (exclusive) of each document.
        full: Pieces that fill a row, of each document and those before it.
        rest: Length of the last piece of each document, which doesn't fill a row; 0 if there is none.
        patterns: How the last pieces are packed.
        ends: Rows up to the end of each pattern.
    """

    starts: np.ndarray
    stops: np.ndarray
    full: np.ndarray
    rest: np.ndarray
    patterns: list[RowPattern]
    ends: np.ndarray

    @property
    def rows(self) -> int:
        return int(self.full[-1]) + (int(self.ends[-1]) if len(self.ends) else 0)

    def num_tokens(self, length: int) -> int:
        return int(self.full[-1]) * length + int(self.rest.sum())

    def spans(self, row: int, by_size: np.ndarray, length: int) -> list[Span]:
        """The documents of a row: rows that one piece fills come first, then the packed ones."""
        if row < self.full[-1]:
            document = int(np.searchsorted(self.full, row, side="right"))
            first_row = int(self.full[document - 1]) if document else 0
            start = int(self.starts[document]) + (row - first_row) * (length - 1)
            return [Span(start, start + length, row > first_row)]
        row -= int(self.full[-1])
        number = int(np.searchsorted(self.ends, row, side="right"))
        pattern = self.patterns[number]
        repeat = row - (int(self.ends[number - 1]) if number else 0)
        spans = []
        for size, count, first in zip(pattern.sizes, pattern.counts, pattern.firsts, strict=True):
            first += repeat * count
            for document in by_size[first : first + count]:
                stop = int(self.stops[document])
                spans.append(Span(stop - size, stop, stop - size != self.starts[document]))
        return spans


class RowPattern(NamedTuple):
    """Rows with documents of the same sizes.

    Attributes:
        sizes: Sizes of the documents in a row, in tokens.
        counts: Documents of each size in a row.
        firsts: Where the documents of the first row start, for each size, among all documents ordered by size.
        repeats: Number of rows.
    """

    sizes: list[int]
    counts: list[int]
    firsts: list[int]
    repeats: int


def first_fit_decreasing(counts: np.ndarray) -> list[RowPattern]:
    """Pack documents into rows: each takes the longest document that is left, then the longest that fits, and so on.

    First-fit decreasing takes at most 11/9 of the optimal number of rows, plus one (Johnson et al., 1974).

    Args:
        counts: Documents of each size from 0 to the length of a row; those of size 0 are left out.
    """
    length = len(counts) - 1
    left = counts.tolist()
    firsts = np.cumsum([0, *left[:-1]]).tolist()
    sizes_left = sum(1 << size for size in range(1, length + 1) if left[size])  # a bit for each size
    patterns: list[RowPattern] = []
    while sizes_left:
        sizes, in_row, free, fitting = [], [], length, sizes_left
        while fitting := fitting & ((2 << free) - 1):
            size = fitting.bit_length() - 1
            sizes.append(size)
            in_row.append(min(left[size], free // size))
            free -= size * in_row[-1]
            fitting ^= 1 << size
        repeats = min(left[size] // count for size, count in zip(sizes, in_row, strict=True))
        patterns.append(RowPattern(sizes, in_row, [firsts[size] for size in sizes], repeats))
        for size, count in zip(sizes, in_row, strict=True):
            left[size] -= count * repeats
            firsts[size] += count * repeats
            if not left[size]:
                sizes_left ^= 1 << size
    return patterns


_ROUNDS = 4


def permutation_keys(*seed: int) -> tuple[np.ndarray, int]:
    """Round keys for `permute`, and another random 64-bit number, derived from `seed`."""
    state = np.random.SeedSequence(seed).generate_state(_ROUNDS + 1, np.uint64)
    return state[:_ROUNDS], int(state[-1])


def permute(indices: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """Apply a keyed pseudorandom permutation of range(n) to `indices`.

    A balanced Feistel network over the next even power of two, applied again to values outside the range (cycle
    walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).

    Args:
        indices: Integers below `n`, 1-D.
        n: Size of the range.
        keys: From `permutation_keys`.

    Returns:
        uint64, of the shape of `indices`.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    values = indices.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for key in keys:
            left, right = right, left ^ (splitmix64(right ^ key) & mask)
        values[outside] = left << half | right
        outside = values >= n
    return values


def splitmix64(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
