"""The cache of a recurrent layer: a state instead of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import NamedTuple

from mlxlm.backend.mlx import mx
from mlxlm.utils.errors import GenerationError

# Updates that can be undone: a decoding step is dispatched before the token of the one before is read.
MAX_UNDO = 2
_FLOATS = (mx.float32, mx.float16, mx.bfloat16)


class _Update(NamedTuple):
    """What an update has replaced.

    Attributes:
        counts: The tokens that it read of each row, 0 if unknown.
        before: The arrays before it.
        after: By the index of an array, a function that returns it after the first n tokens.
    """

    counts: list[int]
    before: list[mx.array | None]
    after: dict[int, Callable[[int], mx.array]]


class RecurrentCache:
    """The state of a recurrent layer, arrays `[B, ...]`, for a batch of texts.

    Layers read and write it as `cache[i]`, like mlx_lm's `ArraysCache`; before the first token it is None. A state
    can't be cut at any token: what the last two updates replaced is kept, so that `trim` can undo them. Of a short
    update of one row, such as a draft, it can undo a part.

    Args:
        shapes: The shape of each array, of one row and without the axis of rows; None if it isn't known.

    Attributes:
        rows: Batch size B.
        max_undo: Updates that can be undone.
        can_pad: Whether the layer reads which positions are padding.
        max_partial: Tokens of an update of which a part can be undone.
    """

    can_pad = True
    max_partial = 64

    def __init__(self, shapes: Sequence[tuple[int, ...] | None]) -> None:
        self.rows, self.max_undo = 1, MAX_UNDO
        self._shapes = shapes
        self._padding: list[int] = []  # of the rows in the next update
        self._arrays: list[mx.array | None] = [None] * len(shapes)
        self._undo: list[_Update] = []  # the last updates

    def __getitem__(self, index: int) -> mx.array | None:
        return self._arrays[index]

    def __setitem__(self, index: int, value: mx.array | None) -> None:
        self._arrays[index] = value

    @property
    def state(self) -> list[mx.array]:
        """All arrays."""
        states = [self._arrays, *(update.before for update in self._undo)]
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
        self._undo = [*self._undo[1 - self.max_undo :], _Update(counts, list(self._arrays), {})]
        return mx.arange(count) >= mx.array(pads)[:, None] if any(pads) else None

    def set_after(self, index: int, after: Callable[[int], mx.array]) -> None:
        """Let `trim` undo a part of this update: `after(n)` returns array `index` after the first n tokens."""
        if self.rows == 1 and 1 < self._undo[-1].counts[0] <= self.max_partial:
            self._undo[-1].after[index] = after

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

    @property
    def num_trimmable(self) -> int:
        """How many of its last tokens a state of a file or of the prefix cache can drop: none."""
        return 0

    def can_trim(self, count: int) -> bool:
        """Whether the last `count` tokens of each row can be dropped."""
        return self._find(count) is not None

    def trim(self, count: int) -> None:
        """Drop the last `count` tokens of each row.

        Raises:
            GenerationError: `can_trim` is false. The cache is unchanged.
        """
        if (found := self._find(count)) is None:
            raise GenerationError(f"can't trim {count} tokens from a recurrent state", "an empty cache")
        undone, rest = found
        kept = len(self._undo) - undone
        if rest:
            update = self._undo[kept - 1]
            self._arrays = [update.after[i](rest) for i in range(len(self._arrays))]
            self._undo = [*self._undo[: kept - 1], update._replace(counts=[rest] * self.rows)]
        elif undone:
            self._arrays = list(self._undo[kept].before)
            self._undo = self._undo[:kept]

    def _find(self, count: int) -> tuple[int, int] | None:
        """Where the last `count` tokens of each row begin.

        Returns:
            How many updates read only such tokens, and how many other tokens the one before them read, if it read any
            of these; None if they can't be dropped.
        """
        left = [count] * self.rows
        for undone in range(len(self._undo) + 1):
            if not any(left):
                return undone, 0
            update = self._undo[-undone - 1] if undone < len(self._undo) else None
            if update is None or not all(update.counts):
                return None
            left = [rest - read for rest, read in zip(left, update.counts, strict=True)]
            if left[0] < 0 and len(update.after) == len(self._arrays):  # of a single row
                return undone, -left[0]
        return None

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order."""
        index, self.rows = mx.array(rows), len(rows)
        self._arrays = _take(self._arrays, index)
        self._undo = [_Update([u.counts[row] for row in rows], _take(u.before, index), {}) for u in self._undo]

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
        merged = cls(caches[0]._shapes)
        merged.rows = sum(cache.rows for cache in caches)
        merged._arrays = _stack([(cache._arrays, cache.rows) for cache in caches])
        for depth in range(max(len(cache._undo) for cache in caches), 0, -1):
            parts = [
                cache._undo[-depth] if depth <= len(cache._undo) else _Update([0] * cache.rows, cache._arrays, {})
                for cache in caches
            ]
            counts = [count for part in parts for count in part.counts]
            merged._undo.append(_Update(counts, _stack([(part.before, len(part.counts)) for part in parts]), {}))
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

    def arrays(self) -> tuple[dict[str, mx.array], int]:
        """Return the arrays by name, for a file, and 0: no token counts as dropped."""
        return {f"state.{i}": x for i, x in enumerate(self._arrays) if x is not None}, 0

    def set_arrays(self, arrays: Mapping[str, mx.array], dropped: int) -> None:
        """Replace the contents with the result of `arrays` of a cache of the same layer.

        Raises:
            ValueError: The layer can't have such arrays. The cache is unchanged.
        """
        names = [f"state.{i}" for i in range(len(self._shapes))]
        if dropped or set(arrays) != set(names):
            raise ValueError(f"a state has {len(names)} arrays, and no dropped tokens")
        for name, shape in zip(names, self._shapes, strict=True):
            x = arrays[name]
            if x.dtype not in _FLOATS or x.shape[:1] != (1,) or (shape is not None and x.shape[1:] != shape):
                raise ValueError(f"{name} is {x.shape} {x.dtype}")
        self._arrays, self._undo, self.rows = [arrays[name] for name in names], [], 1


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
