"""The key-value cache of one layer: what attention keeps of the tokens it has seen."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from mlxlm.backend.mlx import mx
from mlxlm.cache.kv_buffer import KVBuffer, group_size
from mlxlm.cache.rotation import RotationPolicy, Sink, SlidingWindow
from mlxlm.kernels import QuantizedKV
from mlxlm.utils.errors import GenerationError

STEP = 256  # positions that the buffers grow by: a decoded token writes in place instead of copying the cache

Held = mx.array | QuantizedKV


class KVCache:
    """Keys and values `[B, H_kv, S, D]` of one layer, for one text or several side by side.

    All rows end at the same index of the buffers; before a row's first token is padding. By default it holds all that
    it is given. `rotation` bounds a text's tokens, `window` is what the layer's own attention sees; `key_bits` and
    `value_bits` (8, 4 or None) hold either of them quantized. The interface is that of mlx_lm's caches, and more.

    `expected_length` is the length that the text will have, None while nobody knows: with "longrope", positions depend on it.
    """

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
        self.expected_length: int | None = None
        self._keys: KVBuffer | None = None
        self._values: KVBuffer | None = None
        self._starts: list[int] = []  # of each row, the index of its first token
        self._dropped: list[int] = []  # and how many tokens it has dropped
        self._sinks: list[Sink | None] = []  # the kept tokens of rows that have dropped some
        self._pads: list[int] | None = None  # of the next update
        self._end = 0
        self._bound = 0  # of `_end`, up to which an update only writes
        self._first = 0  # of the positions that the last update returned
        self._latest = 0  # of the starts at that time

    # What it holds

    @property
    def rows(self) -> int:
        """B; one before the first token."""
        return len(self._starts) or 1

    @property
    def offsets(self) -> list[int]:
        """The position of the next token of each row; with padding to come, that of the first padding."""
        found = [lost + self._end - start for lost, start in zip(self._dropped, self._starts, strict=True)] or [0]
        return found if self._pads is None else [offset - pad for offset, pad in zip(found, self._pads, strict=True)]

    @property
    def offset(self) -> int | mx.array:
        """`offsets`, as a number for one row and int32 `[B]` for several: what `mx.fast.rope` takes."""
        if len(self._starts) == 1 and self._pads is None:  # once a layer and token: without lists
            return self._dropped[0] + self._end - self._starts[0]
        offsets = self.offsets
        return offsets[0] if len(offsets) == 1 else mx.array(offsets, dtype=mx.int32)

    @property
    def first(self) -> mx.array | None:
        """int32 `[B]`: the index of each row's first token in what the last update returned. None: all are 0."""
        if self._latest <= self._first:
            return None
        return mx.array([max(0, start - self._first) for start in self._starts], dtype=mx.int32)

    @property
    def max_update_size(self) -> int | None:
        """How many positions the next update may have at most; None for any number. Never 0."""
        if self.rotation is None:
            return None
        pads = self._pads or [0] * len(self._starts)
        rooms = [
            self.rotation.max_update_size(self._end - start) + pad
            for start, pad in zip(self._starts, pads, strict=True)
        ]
        return min(rooms, default=self.rotation.size)

    @property
    def max_size(self) -> int | None:
        """How many tokens of a text attention can see at once at most, None without a bound."""
        return None if self.rotation is None else self.rotation.size

    @property
    def nbytes(self) -> int:
        """Bytes held, the room to grow included."""
        if self._keys is None:
            return 0
        kept = sum(x.nbytes for sink in self._sinks if sink for x in sink.arrays)
        return self._keys.nbytes + self._values.nbytes + kept

    def size(self) -> int:
        """Tokens held, of the row that has most."""
        return self._end - min(self._starts, default=0)

    def empty(self) -> bool:
        return self._keys is None

    # Adding

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Held, Held]:
        """Append T positions; return those that the new ones can see, themselves last, `[B, H_kv, S, D]`.

        A quantized side is given as `QuantizedKV`. Raises GenerationError for more positions than `max_update_size`.
        """
        rows, _, count, _ = keys.shape
        if self._end + count > self._bound or self._pads is not None or rows != len(self._starts):
            self._make_room(keys, values)
        begin, end = self._end, self._end + count
        self._keys.write(begin, end, keys)
        self._values.write(begin, end, values)
        self._end = end
        if self._pads is not None:
            self._starts = [begin + pad if pad else start for pad, start in zip(self._pads, self._starts, strict=True)]
            self._pads = None
        if rows == 1:
            first = self._latest = self._starts[0]
        else:
            first, self._latest = min(self._starts), max(self._starts)
        if first > begin:  # all rows begin with padding
            first = begin
        if self.window is not None:
            first = max(first, begin - self.window.seen)
        self._first = first
        return self._keys.read(first, end), self._values.read(first, end)

    def set_left_padding(self, pads: Sequence[int]) -> None:
        """Of the next update's T positions, the first `pads[b]` of row b are padding.

        Only a row without tokens can have padding. Raises ValueError otherwise.
        """
        if not self._starts:
            self._begin(len(pads))
        if len(pads) != len(self._starts):
            raise ValueError(f"{len(pads)} numbers of padding for {len(self._starts)} rows")
        for row, (pad, offset) in enumerate(zip(pads, self.offsets, strict=True)):
            if pad and offset > 0:
                raise ValueError(f"row {row} has {offset} tokens, behind which padding can't come")
        self._pads = list(pads) if any(pads) else None

    def _make_room(self, keys: mx.array, values: mx.array) -> None:
        """Drop what must go, and let the buffers have room for T more positions."""
        rows, count = keys.shape[0], keys.shape[2]
        if not self._starts:
            self._begin(rows)
        if self._keys is None:
            self._allocate(keys, values)
        for held, new in ((self._keys, keys), (self._values, values)):
            if (held.shape[1], held.shape[3], held.dtype) != (new.shape[1], new.shape[3], new.dtype):
                problem = f"the cache has {held.dtype} {held.shape}, and the model gives {new.dtype} {new.shape}"
                raise GenerationError(problem, "the model that the cache was made with")
        if rows != len(self._starts) or max(self._pads or [0]) > count:
            raise ValueError(f"keys {keys.shape} for {len(self._starts)} rows with padding {self._pads}")
        if self.rotation is not None:
            self._rotate(count)
        if self._end + count > self._keys.capacity:
            self._move(count)
        self._bound = self._keys.capacity
        if self.rotation is not None:
            self._bound = min(self._bound, *(start + self.rotation.size for start in self._starts))

    def _begin(self, rows: int) -> None:
        self._starts, self._dropped, self._sinks = [0] * rows, [0] * rows, [None] * rows

    def _allocate(self, keys: mx.array, values: mx.array) -> None:
        quantized = [x.shape[3] for x, bits in ((keys, self.key_bits), (values, self.value_bits)) if bits]
        group = group_size(*quantized) if quantized else None
        self._keys = KVBuffer.like(keys, self.key_bits, group)
        self._values = KVBuffer.like(values, self.value_bits, group)

    def _rotate(self, count: int) -> None:
        """Drop the oldest tokens behind the kept ones in those rows that would hold too many."""
        rule, full = self.rotation, []
        for row, (start, pad) in enumerate(zip(self._starts, self._pads or [0] * self.rows, strict=True)):
            held, added = self._end - start, count - pad
            if added > rule.max_update_size(held):
                raise GenerationError(
                    f"{added} tokens at once, and a rotating cache that holds {held} of {rule.size} has room for "
                    f"{rule.max_update_size(held)} before it drops some",
                    f"pieces of at most {rule.step}",
                )
            if held + added > rule.size:
                full.append(row)
        for row in full:
            self._drop(row)

    def _drop(self, row: int) -> None:
        rule, start = self.rotation, self._starts[row]
        if rule.keep and self._sinks[row] is None:
            kept = start, start + rule.keep
            self._sinks[row] = Sink(self._keys.slice_row(row, *kept), self._values.slice_row(row, *kept))
        self._starts[row] += rule.step
        self._dropped[row] += rule.step
        if (sink := self._sinks[row]) is not None:
            keys = sink.keys.arrays
            if rule.shift_keys is not None:
                keys = self._keys.quantize(rule.shift_keys(sink.keys.dequantized(), self._dropped[row], self))
            self._keys.write_to_row(row, self._starts[row], keys)
            self._values.write_to_row(row, self._starts[row], sink.values.arrays)

    def _move(self, count: int) -> None:
        """Larger buffers, or the same again with what is held at their front."""
        if self.window is not None:
            for row, start in enumerate(self._starts):
                lost = max(0, self._end - self.window.held - start)
                self._starts[row] += lost
                self._dropped[row] += lost
        first = min(self._starts)
        needed = self._end - first + count
        capacity = -(-needed // STEP) * STEP
        if (bound := self.rotation or self.window) is not None:
            capacity = -(-(needed + bound.extra_capacity) // STEP) * STEP
            capacity = min(capacity, max(needed, bound.held) + bound.extra_capacity)
        self._keys = self._keys.resize(first, self._end, capacity)
        self._values = self._values.resize(first, self._end, capacity)
        self._starts = [start - first for start in self._starts]
        self._end -= first

    # Taking away

    def can_trim(self, n: int) -> bool:
        """Whether the last `n` tokens of every row can be forgotten; not where what came before them was dropped."""
        bound = self.rotation or self.window
        return all(
            not lost or self._end - n - start >= bound.min_tokens_to_trim
            for start, lost in zip(self._starts, self._dropped, strict=True)
        )

    def is_trimmable(self) -> bool:
        """Whether any number of tokens can be forgotten."""
        return not any(self._dropped)

    def trim(self, n: int) -> int:
        """Forget the last `n` tokens of every row (at most what the shortest holds); return how many were forgotten.

        Raises GenerationError, and changes nothing, where what came before them was dropped.
        """
        if not self.can_trim(n):
            raise GenerationError(
                f"the last {n} tokens can't be taken from a cache that has dropped older ones", "a cleared cache"
            )
        n = min(max(n, 0), self._end - max(self._starts, default=self._end))
        self._end -= n
        return n

    # Rows

    @classmethod
    def merge(cls, rows: Sequence[KVCache]) -> KVCache:
        """The rows of all these caches side by side, which were made alike; they stay as they are."""
        merged = rows[0]._alike()
        longest = max(cache.size() for cache in rows)
        for cache in rows:
            merged._starts += [longest - (cache._end - start) for start in cache._starts] or [longest]
            merged._dropped += cache._dropped or [0]
            merged._sinks += cache._sinks or [None]
        merged._end = longest
        for side in ("_keys", "_values"):
            if filled := [store for cache in rows if (store := getattr(cache, side)) is not None]:
                setattr(merged, side, KVBuffer.stack([cache._held(side, filled[0]) for cache in rows]))
        return merged

    def _held(self, side: str, like: KVBuffer) -> KVBuffer:
        """The filled part of the keys or the values; none as those of `like` before the first token."""
        store, first = getattr(self, side), min(self._starts, default=0)
        if store is None:
            return like.map_arrays(lambda x: mx.zeros((self.rows, x.shape[1], 0, x.shape[3]), x.dtype))
        return store.map_arrays(lambda x: x[:, :, first : self._end])

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; padding that all of them have goes."""
        first = min(self._starts[row] for row in rows)
        index = mx.array(rows)
        for name in ("_keys", "_values"):
            if (store := getattr(self, name)) is not None:
                setattr(self, name, store.map_arrays(lambda x: mx.take(x[:, :, first : self._end], index, axis=0)))
        self._starts = [self._starts[row] - first for row in rows]
        self._dropped = [self._dropped[row] for row in rows]
        self._sinks = [self._sinks[row] for row in rows]
        self._end -= first
        self._bound = 0  # the next update makes room

    def copy(self) -> KVCache:
        """Another one with the same tokens. Arrays are shared until either is written to."""
        other = copy(self)
        other._starts, other._dropped, other._sinks = list(self._starts), list(self._dropped), list(self._sinks)
        if self._keys is not None:
            other._keys, other._values = self._keys.map_arrays(copy), self._values.map_arrays(copy)
        return other

    def _alike(self) -> KVCache:
        """An empty one of the same kind."""
        return type(self)(
            rotation=self.rotation, window=self.window, key_bits=self.key_bits, value_bits=self.value_bits
        )

    # Its arrays

    @property
    def state(self) -> tuple[mx.array, ...]:
        """Every array with tokens in it: the filled part of keys and of values, and what kept tokens were."""
        if self._keys is None:
            return ()
        filled = [*self._held("_keys", self._keys).arrays, *self._held("_values", self._values).arrays]
        return (*filled, *(x for sink in self._sinks if sink for x in sink.arrays))

    @state.setter
    def state(self, value: tuple[mx.array, ...]) -> None:
        """Hold these keys and values, of texts that have dropped nothing and need no padding."""
        empty = self._alike()
        empty.expected_length = self.expected_length
        self.__dict__ = empty.__dict__
        if not value:
            return
        parts = 1 if self.key_bits is None else 3
        self._keys, self._values = (
            KVBuffer.of(value[:parts], self.key_bits),
            KVBuffer.of(value[parts:], self.value_bits),
        )
        self._begin(self._keys.rows)
        self._end = self._keys.capacity
