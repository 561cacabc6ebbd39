"""The key-value cache of one layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from itertools import chain

from mlxlm.backend.mlx import mx
from mlxlm.cache.kv_buffer import KVBuffer, group_size, zero_pad
from mlxlm.cache.policies import RotationPolicy, SlidingWindow
from mlxlm.kernels import QuantizedKV
from mlxlm.utils.errors import GenerationError

_SIDES = ("keys", "values", "kept_keys", "kept_values")  # names of the arrays in a file
STEP = 256  # the buffers grow by at least this many positions, so that decoding rarely copies the cache


def round_length(length: int) -> int:
    """Round up to the sizes of buffers: multiples of 256 up to 4,096, then at most an eighth more."""
    step = max(STEP, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step


class KVCache:
    """Keys and values `[B, H_kv, S, D]` of one layer, for a batch of texts.

    The interface is a superset of that of mlx_lm's caches. By default the cache is unbounded.

    Between two calls this holds:

    - All rows end at the same index of the buffers: row b's tokens are at `_starts[b]` to `_end` - 1. What is before
      them is padding, which attention doesn't see; from `_end` up to the capacity is free. After `set_left_padding`,
      `_starts[b]` is beyond `_end`: row b's next update begins with padding.
    - The text of row b has `_dropped[b]` more tokens: its next one has the position `_dropped[b] + _end - _starts[b]`.
    - `_sinks[b]` are original keys and values of the first `rotation.keep` tokens, once row b has dropped others. The
      keys in the buffers are always shifted from these, so that rounding errors don't add up.
    - `_first` is the index of the first position that the last update returned, `_last_count` its number of new ones.

    Args:
        rotation: Limits the number of tokens per text.
        window: Drops tokens outside of the layer's sliding window.
        key_bits: 8 or 4 to quantize keys, None for the model's dtype.
        value_bits: The same for values.

    Attributes:
        can_pad: Whether `set_left_padding` can be called.
        long_factors: Whether "longrope" positions are those of a long text. None: as each forward pass is long.
    """

    can_pad = True

    def __init__(
        self,
        *,
        rotation: RotationPolicy | None = None,
        window: SlidingWindow | None = None,
        key_bits: int | None = None,
        value_bits: int | None = None,
    ) -> None:
        self.rotation, self.window = rotation, window
        self.key_bits, self.value_bits = key_bits, value_bits
        self.long_factors: bool | None = None
        self._clear()

    def _clear(self) -> None:
        self._buffers: list[KVBuffer] = []  # of keys and of values; none before the first token
        self._starts: list[int] = []
        self._dropped: list[int] = []
        self._sinks: list[list[KVBuffer]] = []
        self._end = self._first = self._last_count = 0

    @property
    def rows(self) -> int:
        """Batch size B; 1 before the first token."""
        return len(self._starts) or 1

    @property
    def offsets(self) -> list[int]:
        """Position of each row's next token, or of its next padding if `set_left_padding` was called."""
        return [lost + self._end - start for lost, start in zip(self._dropped, self._starts, strict=True)] or [0]

    @property
    def offset(self) -> int | mx.array:
        """`offsets` in the form of `mx.fast.rope`: an int for one row, int32 `[B]` for several."""
        offsets = self.offsets
        return offsets[0] if len(offsets) == 1 else mx.array(offsets, dtype=mx.int32)

    @property
    def first(self) -> mx.array | None:
        """Index of each row's first token in what the last update returned, int32 `[B]`. None if all are 0."""
        if max(self._starts, default=0) <= self._first:
            return None
        return mx.array([max(0, start - self._first) for start in self._starts], dtype=mx.int32)

    @property
    def max_update_size(self) -> int | None:
        """Maximum number of positions of the next update, None if unlimited. Never 0."""
        return None if self.rotation is None else self._room(self.rotation)

    @property
    def max_size(self) -> int | None:
        """Maximum number of tokens per text, None if unlimited."""
        return None if self.rotation is None else self.rotation.size

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers, including their unused capacity."""
        return sum(buffer.nbytes for buffer in chain(self._buffers, *self._sinks))

    @property
    def capacity(self) -> int:
        """Number of positions of the buffers."""
        return self._buffers[0].capacity if self._buffers else 0

    def size(self) -> int:
        """Number of tokens in the longest row."""
        return self._end - min(self._starts, default=0)

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array | QuantizedKV, mx.array | QuantizedKV]:
        """Append keys and values `[B, H_kv, T, D]`.

        Returns:
            Those that the new positions can see, themselves included, `[B, H_kv, S, D]`; `QuantizedKV` if quantized.

        Raises:
            GenerationError: T is more than `max_update_size`, or the model is not the one that filled the cache.
        """
        rows, _, count, _ = keys.shape
        if not self._starts:
            self._begin(rows)
        if not self._buffers:
            self._allocate(keys, values)
        self._make_room(count, keys, values)
        begin, end = self._end, self._end + count
        key_buffer, value_buffer = self._buffers
        key_buffer.write(begin, end, keys)
        value_buffer.write(begin, end, values)
        self._end = end
        self._first, self._last_count = min(begin, *self._starts), count
        if self.window is not None:
            self._first = max(self._first, begin - self.window.num_visible)
        return self.fetch()

    def fetch(self) -> tuple[mx.array | QuantizedKV, mx.array | QuantizedKV]:
        """Return the result of the last update once more."""
        key_buffer, value_buffer = self._buffers
        return key_buffer.read(self._first, self._end), value_buffer.read(self._first, self._end)

    @property
    def fetched_offset(self) -> int | mx.array:
        """`offset` before the last update."""
        return self.offset - self._last_count

    def set_left_padding(self, pads: Sequence[int]) -> None:
        """Declare the first `pads[b]` positions of row b in the next update as padding; 0 for rows that have tokens."""
        if not self._starts:
            self._begin(len(pads))
        self._starts = [self._end + pad if pad else start for pad, start in zip(pads, self._starts, strict=True)]

    @property
    def can_step(self) -> bool:
        """Whether `begin_step` can be called: not before the first token, nor with padding."""
        return bool(self._buffers) and max(self._starts) <= self._end

    @property
    def buffers(self) -> list[KVBuffer]:
        """The buffers of keys and of values; none before the first token."""
        return self._buffers

    @property
    def step_arrays(self) -> list[mx.array]:
        """The arrays of `buffers`, which a compiled step reads and returns new ones for."""
        return [array for buffer in self._buffers for array in buffer.arrays]

    def begin_step(self, count: int = 1) -> tuple[int, list[int], int]:
        """Make room for `count` tokens per row, which the caller writes to `buffers`; `end_step` appends them.

        Returns:
            The index of the next token in the buffers, that of each row's first token, and the capacity of the buffers.
        """
        self._make_room(count)
        self._last_count = count
        return self._end, self._starts, self._buffers[0].capacity

    def end_step(self, arrays: list[mx.array]) -> None:
        """Replace `step_arrays` by those with the tokens of the step."""
        rest = iter(arrays)
        self._buffers = [KVBuffer([next(rest) for _ in b.arrays], b.quantization) for b in self._buffers]
        self._end += self._last_count

    def _make_room(self, count: int, *sides: mx.array) -> None:
        """Drop tokens if needed, and make room for `count` more positions: those of `sides`, if they are given."""
        if self.rotation is not None:
            self._rotate(self.rotation, count)
        if self._end + count <= self._buffers[0].capacity:
            return
        for buffer, new in zip(self._buffers, sides, strict=False):
            if (buffer.shape[1], buffer.shape[3], buffer.dtype) != (new.shape[1], new.shape[3], new.dtype):
                problem = f"the cache has {buffer.dtype} {buffer.shape}, but the model gives {new.dtype} {new.shape}"
                raise GenerationError(problem, "the model that the cache was made with")
        self._move(count)

    def _begin(self, rows: int) -> None:
        self._starts, self._dropped, self._sinks = [0] * rows, [0] * rows, [[]] * rows

    def _allocate(self, *sides: mx.array) -> None:
        bits = self.key_bits, self.value_bits
        group = group_size(*(x.shape[3] for x, b in zip(sides, bits, strict=True) if b))
        self._buffers = [KVBuffer.like(x, None if b is None else (b, group)) for x, b in zip(sides, bits, strict=True)]

    def _room(self, policy: RotationPolicy) -> int:
        return min((policy.max_update_size(self._end - start) for start in self._starts), default=policy.size)

    def _rotate(self, policy: RotationPolicy, count: int) -> None:
        """Drop the oldest tokens after the sinks in rows that would become too long."""
        if count > (room := self._room(policy)):
            raise GenerationError(
                f"{count} tokens at once, but a rotating cache with {self.size()} of {policy.size} tokens has room for "
                f"{room}",
                f"chunks of at most {policy.step} tokens",
            )
        for row, start in enumerate(self._starts):
            if self._end - start + count > policy.size:
                self._drop(policy, row)

    def _drop(self, policy: RotationPolicy, row: int) -> None:
        start = self._starts[row]
        if policy.keep and not self._sinks[row]:
            self._sinks[row] = [buffer.slice_row(row, start, start + policy.keep) for buffer in self._buffers]
        self._starts[row] += policy.step
        self._dropped[row] += policy.step
        for side, (buffer, sink) in enumerate(zip(self._buffers, self._sinks[row], strict=False)):
            arrays: Sequence[mx.array] = sink.arrays
            if side == 0 and policy.shift_keys is not None:
                arrays = buffer.quantize(policy.shift_keys(sink.dequantized(), self._dropped[row], self))
            buffer.write_to_row(row, self._starts[row], arrays)

    def _move(self, count: int) -> None:
        """Move to new buffers with room for `count` more tokens; drop what no window can see."""
        if self.window is not None:
            for row, start in enumerate(self._starts):
                lost = max(0, self._end - self.window.num_retained - start)
                self._starts[row] += lost
                self._dropped[row] += lost
        first = min(self._end, *self._starts)
        capacity = self._capacity(self._end - first, count)
        self._buffers = [buffer.resize(first, self._end, capacity) for buffer in self._buffers]
        self._starts = [start - first for start in self._starts]
        self._end -= first

    def _capacity(self, length: int, count: int) -> int:
        """How many positions to allocate for `length` tokens and `count` more."""
        needed = length + count
        if (bound := self.rotation or self.window) is None:
            return round_length(needed)
        capacity = round_length(needed + bound.extra_capacity)
        return min(capacity, max(needed, bound.num_retained) + bound.extra_capacity)

    @property
    def num_trimmable(self) -> int:
        """How many of the last tokens can be removed from every row."""
        bound = self.rotation or self.window
        least = 0 if bound is None else bound.min_tokens_to_trim
        rows = zip(self._starts, self._dropped, strict=True)
        return min((self._end - start - (least if lost else 0) for start, lost in rows), default=0)

    def can_trim(self, n: int) -> bool:
        """Whether the last `n` tokens of every row can be removed: not if the tokens before them were dropped."""
        bound = self.rotation or self.window
        return all(
            not lost or bound is not None and self._end - n - start >= bound.min_tokens_to_trim
            for start, lost in zip(self._starts, self._dropped, strict=True)
        )

    def is_trimmable(self) -> bool:
        """Whether any number of tokens can be removed."""
        return not any(self._dropped)

    def trim(self, n: int) -> int:
        """Remove the last `n` tokens of every row, at most as many as the shortest row has, and return their number.

        Raises:
            GenerationError: The tokens before them were dropped. The cache is unchanged.
        """
        if not self.can_trim(n):
            raise GenerationError(
                f"can't trim {n} tokens from a cache that has dropped the tokens before them", "an empty cache"
            )
        n = min(max(n, 0), self._end - max(self._starts, default=self._end))
        self._end -= n
        return n

    @classmethod
    def merge(cls, rows: Sequence[KVCache]) -> KVCache:
        """Batch the rows of several caches with the same settings. The caches themselves are unchanged."""
        merged = rows[0]._empty_like()
        longest = max(cache.size() for cache in rows)
        for cache in rows:
            merged._starts += [longest - (cache._end - start) for start in cache._starts] or [longest]
            merged._dropped += cache._dropped or [0]
            merged._sinks += cache._sinks or [[]]
        merged._end = longest
        like = next((cache._buffers for cache in rows if cache._buffers), [])
        sides = zip(*(cache._filled(like) for cache in rows), strict=True)
        merged._buffers = [KVBuffer.stack(side) for side in sides]
        return merged

    def can_replace_rows(self, other: KVCache) -> bool:
        """Whether `replace_rows` can take the rows of `other`: they are no longer than this cache, and not limited."""
        fits = self.can_step and bool(other._buffers) and other.size() <= self._end
        return fits and self.rotation is None and self.long_factors == other.long_factors

    def replace_rows(self, rows: Sequence[int], other: KVCache) -> None:
        """Replace `rows` by all rows of a cache with the same settings, without copying the others."""
        padding = self._end - other.size()
        for buffer, source in zip(self._buffers, other._filled(), strict=True):
            for array, new in zip(buffer.arrays, source.arrays, strict=True):
                new = zero_pad(new, padding, 0)
                for i, row in enumerate(rows):
                    array[row : row + 1, :, : self._end] = new[i : i + 1]
        for i, row in enumerate(rows):
            self._starts[row] = self._end - (other._end - other._starts[i])
            self._dropped[row] = other._dropped[i]

    def _filled(self, like: Sequence[KVBuffer] = ()) -> list[KVBuffer]:
        """The filled part of keys and values; before the first token, no positions in the form of `like`."""
        if not self._buffers:
            B = self.rows
            return [b.map_arrays(lambda x: mx.zeros((B, x.shape[1], 0, x.shape[3]), x.dtype)) for b in like]
        first, end = min(self._starts), self._end
        return [buffer.map_arrays(lambda x: x[:, :, first:end]) for buffer in self._buffers]

    def select(self, rows: Sequence[int]) -> None:
        """Keep only these rows, in this order, without their common padding."""
        first, end, index = min(self._starts[row] for row in rows), self._end, mx.array(rows)
        self._buffers = [b.map_arrays(lambda x: mx.take(x[:, :, first:end], index, axis=0)) for b in self._buffers]
        self._starts = [self._starts[row] - first for row in rows]
        self._dropped = [self._dropped[row] for row in rows]
        self._sinks = [self._sinks[row] for row in rows]
        self._end -= first

    def row(self, index: int) -> KVCache:
        """Return a cache of one row, without its left padding. Arrays are shared until either cache is written to.

        Until the result is evaluated and freed, the next update of this cache copies its buffers.
        """
        row = self._empty_like()
        if not self._starts:
            return row
        start, end = self._starts[index], self._end
        row._starts, row._dropped, row._sinks = [0], [self._dropped[index]], [self._sinks[index]]
        row._buffers = [b.map_arrays(lambda x: x[index : index + 1, :, start:end]) for b in self._buffers]
        row._end = end - start
        return row

    def copy(self) -> KVCache:
        """Copy the cache. Arrays are shared until either copy is written to."""
        other = copy(self)
        other._starts, other._dropped, other._sinks = list(self._starts), list(self._dropped), list(self._sinks)
        other._buffers = [buffer.map_arrays(copy) for buffer in self._buffers]
        return other

    def _empty_like(self) -> KVCache:
        """An empty cache with the same settings."""
        other = copy(self)
        other._clear()
        return other

    @property
    def state(self) -> tuple[mx.array, ...]:
        """All arrays with tokens: the filled part of keys and values, and the sinks."""
        return tuple(x for buffer in chain(self._filled(), *self._sinks) for x in buffer.arrays)

    # For files and the prefix cache: caches of one text.

    @property
    def holds_all_tokens(self) -> bool:
        """Whether no token is missing, so that the cache can be cut at any of them.

        False for a sliding window, which drops tokens that a shorter text would see.
        """
        return self.window is None and not any(self._dropped)

    def slice_tokens(self, first: int, end: int) -> list[KVBuffer]:
        """Copy keys and values of these tokens, of a cache that holds all."""
        start = self._starts[0]
        return [buffer.slice_row(0, start + first, start + end) for buffer in self._buffers]

    def fill(self, pieces: Sequence[Sequence[KVBuffer]], room: int) -> None:
        """Fill an empty cache with consecutive pieces, and make room for `room` more tokens."""
        length = sum(keys.capacity for keys, _ in pieces)
        capacity = self._capacity(length, room if self.rotation is None else min(room, self.rotation.size - length))
        self._begin(1)
        self._buffers = [KVBuffer.join(side, capacity) for side in zip(*pieces, strict=True)]
        self._end = length

    def compact_copy(self) -> KVCache:
        """Copy the cache without unused capacity."""
        other = self.row(0)
        other._buffers = [buffer.map_arrays(mx.contiguous) for buffer in other._buffers]
        return other

    def arrays(self) -> tuple[dict[str, mx.array], int]:
        """Return the arrays by name, and how many tokens were dropped."""
        buffers = zip(_SIDES, [*self._filled(), *self._sinks[0]], strict=False)
        named = {f"{side}.{i}": x for side, buffer in buffers for i, x in enumerate(buffer.arrays)}
        return named, self._dropped[0]

    def set_arrays(self, arrays: Mapping[str, mx.array], dropped: int) -> None:
        """Replace the contents with the result of `arrays` of a cache with the same settings.

        Raises:
            ValueError: A cache with these settings can't have such arrays. It is unchanged.
        """
        keep = self.rotation.keep if self.rotation and dropped else 0
        bits = dict(zip(_SIDES if keep else _SIDES[:2], (self.key_bits, self.value_bits) * 2, strict=False))
        names = {side: [f"{side}.{i}" for i in range(1 if b is None else 3)] for side, b in bits.items()}
        if unexpected := set(arrays) ^ set(chain(*names.values())):
            raise ValueError(f"unknown or missing: {', '.join(sorted(unexpected))}")
        buffers = [KVBuffer.of([arrays[name] for name in names[side]], b) for side, b in bits.items()]
        keys, values, *sinks = buffers
        B, H, length, _ = keys.shape
        forms = zip(bits, buffers, (keys, values) * 2, (length, length, keep, keep), strict=False)
        for side, buffer, like, expected in forms:
            if buffer.shape != (1, H, expected, like.shape[3]) or buffer.dtype != keys.dtype:
                raise ValueError(f"{side} are {buffer.shape} {buffer.dtype}, but keys are {keys.shape}")
        bound = self.rotation or self.window
        minimum = bound.min_tokens_to_trim if bound and dropped else 1
        maximum, step = (self.rotation.size, self.rotation.step) if self.rotation else (length, 1)
        if not minimum <= length <= maximum or dropped % step or (dropped and bound is None):
            raise ValueError(f"{length} tokens can't follow {dropped} dropped ones")
        self._begin(1)
        self._buffers, self._end, self._first = [keys, values], length, 0
        self._dropped, self._sinks = [dropped], [sinks]
