"""The cache of a recurrent layer: a state instead of keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from mlxlm.backend.mlx import mx

# Updates that can be undone: a decoding step is dispatched before the token of the one before is read.
MAX_UNDO = 2


class RecurrentCache:
    """The state of a recurrent layer, arrays `[B, ...]`, for a batch of texts.

    Layers read and write it as `cache[i]`, like mlx_lm's `ArraysCache`; before the first token it is None. A state
    can't be cut at a token: what the last two updates replaced is kept, so that `trim` can undo them.

    Args:
        size: Number of arrays.

    Attributes:
        rows: Batch size B.
        can_pad: Whether the layer reads which positions are padding.
    """

    can_pad = True

    def __init__(self, size: int) -> None:
        self.rows = 1
        self._padding: list[int] = []  # of the rows in the next update
        self._arrays: list[mx.array | None] = [None] * size
        # For each of the last updates the tokens that it read of each row, 0 if unknown, and the state before it.
        self._undo: list[tuple[list[int], list[mx.array | None]]] = []

    def __getitem__(self, index: int) -> mx.array | None:
        return self._arrays[index]

    def __setitem__(self, index: int, value: mx.array | None) -> None:
        self._arrays[index] = value

    @property
    def state(self) -> list[mx.array]:
        """All arrays."""
        states = [self._arrays, *(arrays for _, arrays in self._undo)]
        return [array for arrays in states for array in arrays if array is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.state)

    def is_trimmable(self) -> bool:
        """Return False: the cache can't be cut at any token, as those of mlx_lm that say True."""
        return False

    def set_left_padding(self, pads: Sequence[int]) -> None:
        """Declare the first `pads[b]` positions of row b in the next update as padding; 0 for rows that have tokens."""
        self._padding = list(pads)

    def begin_update(self, rows: int, count: int) -> mx.array | None:
        """Remember the state before `count` positions of each row are read.

        Returns:
            Which of them aren't padding, bool `[B, T]`; None if none is.
        """
        self.rows = rows
        pads, self._padding = self._padding, []
        counts = [count - pad for pad in pads or [0] * rows]
        self._undo = [*self._undo[1 - MAX_UNDO :], (counts, list(self._arrays))]
        return mx.arange(count) >= mx.array(pads)[:, None] if any(pads) else None

    @property
    def can_step(self) -> bool:
        """Whether a compiled step can read the arrays: not before the first token."""
        return all(array is not None for array in self._arrays) and not self._padding

    @property
    def step_arrays(self) -> list[mx.array]:
        """The arrays, which a compiled step reads and returns new ones for."""
        return [array for array in self._arrays if array is not None]

    def begin_step(self) -> None:
        """Prepare for one token per row."""
        self.begin_update(self.rows, 1)

    def end_step(self, arrays: list[mx.array]) -> None:
        """Replace the arrays by those after a step."""
        self._arrays = list(arrays)

    def can_trim(self, count: int) -> bool:
        """Whether the last `count` tokens of each row can be dropped."""
        return self._num_undone(count) is not None

    def trim(self, count: int) -> None:
        """Drop the last `count` tokens of each row."""
        if undone := self._num_undone(count):
            self._arrays = list(self._undo[-undone][1])
            self._undo = self._undo[:-undone]

    def _num_undone(self, count: int) -> int | None:
        """How many updates read the last `count` tokens of each row; None if that isn't known."""
        left = [count] * self.rows
        for undone in range(len(self._undo) + 1):
            if not any(left):
                return undone
            counts = self._undo[-undone - 1][0] if undone < len(self._undo) else [0]
            if not all(counts):
                return None
            left = [rest - read for rest, read in zip(left, counts, strict=True)]
        return None

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        index, self.rows = mx.array(rows), len(rows)
        self._arrays = _take(self._arrays, index)
        self._undo = [([counts[row] for row in rows], _take(arrays, index)) for counts, arrays in self._undo]

    def can_replace_rows(self, other: RecurrentCache) -> bool:
        """Whether `replace_rows` can take the rows of `other`."""
        return self.can_step and other.can_step

    def replace_rows(self, rows: Sequence[int], other: RecurrentCache) -> None:
        """Replace `rows` by all rows of another cache."""
        both = self.merge([self, other])
        sources = list(range(self.rows))
        for i, row in enumerate(rows):
            sources[row] = self.rows + i
        both.select(sources)
        self._arrays, self._undo = both._arrays, both._undo

    def row(self, index: int) -> RecurrentCache:
        """Return a cache of one row."""
        row = self.copy()
        row.select([index])
        return row

    @classmethod
    def merge(cls, caches: Sequence[RecurrentCache]) -> RecurrentCache:
        """Stack the rows of several caches."""
        merged = cls(len(caches[0]._arrays))
        merged.rows = sum(cache.rows for cache in caches)
        merged._arrays = _stack([(cache._arrays, cache.rows) for cache in caches])
        for depth in range(max(len(cache._undo) for cache in caches), 0, -1):
            parts = [
                cache._undo[-depth] if depth <= len(cache._undo) else ([0] * cache.rows, cache._arrays)
                for cache in caches
            ]
            counts = [count for counts, _ in parts for count in counts]
            merged._undo.append((counts, _stack([(arrays, len(counts)) for counts, arrays in parts])))
        return merged

    def copy(self) -> RecurrentCache:
        """Copy the cache; the arrays, which are never changed in place, are shared."""
        other = copy(self)
        other._arrays, other._undo = list(self._arrays), list(self._undo)
        return other

    def compact_copy(self) -> RecurrentCache:
        """Copy the state of one row, without what `trim` needs."""
        other = self.row(0)
        other._arrays, other._undo = [None if x is None else mx.contiguous(x) for x in other._arrays], []
        return other


def _take(arrays: list[mx.array | None], index: mx.array) -> list[mx.array | None]:
    return [None if array is None else mx.take(array, index, axis=0) for array in arrays]


def _stack(states: Sequence[tuple[list[mx.array | None], int]]) -> list[mx.array | None]:
    """Concatenate states of several rows, given with their number; those that haven't begun are zeros."""
    stacked: list[mx.array | None] = []
    for parts in zip(*(arrays for arrays, _ in states), strict=True):
        like = next((part for part in parts if part is not None), None)
        filled = [
            mx.zeros((rows, *like.shape[1:]), like.dtype) if part is None and like is not None else part
            for part, (_, rows) in zip(parts, states, strict=True)
        ]
        stacked.append(None if like is None else mx.concatenate(filled))
    return stacked
