"""Key-value caches: what attention keeps of the tokens it has seen."""

from __future__ import annotations

from mlxlm._mlx import mx


class KVCache:
    """A full cache of one layer, for keys and values `[B, H_kv, S, D]`.

    It grows in steps of `step` positions, so that a decoded token writes one row in place instead of
    copying the cache. The interface is mlx_lm's, so that models from there accept it.

    `reach` is the length that the text will have, None while nobody knows: with "longrope", positions depend on it.
    """

    step = 256

    def __init__(self) -> None:
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0
        self.reach: int | None = None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Append T positions; return all keys and values so far, `[B, H_kv, offset, D]`."""
        end = self.offset + keys.shape[2]
        if self.keys is None or end > self.keys.shape[2]:
            self._grow(keys, values, end)
        self.keys[..., self.offset : end, :] = keys
        self.values[..., self.offset : end, :] = values
        self.offset = end
        return self.keys[..., :end, :], self.values[..., :end, :]

    def _grow(self, keys: mx.array, values: mx.array, end: int) -> None:
        capacity = -(-end // self.step) * self.step

        def grown(old: mx.array | None, new: mx.array) -> mx.array:
            batch, heads, _, dim = new.shape
            kept = 0 if old is None else self.offset
            room = mx.zeros((batch, heads, capacity - kept, dim), new.dtype)
            return room if kept == 0 else mx.concatenate([old[..., :kept, :], room], axis=2)

        self.keys, self.values = grown(self.keys, keys), grown(self.values, values)

    def trim(self, n: int) -> int:
        """Forget the last `n` positions (at most all of them); return how many were forgotten."""
        n = min(max(n, 0), self.offset)
        self.offset -= n
        return n

    def is_trimmable(self) -> bool:
        return True

    @property
    def state(self) -> tuple[mx.array, mx.array] | tuple[()]:
        """The filled part of keys and values; empty before the first token."""
        if self.keys is None:
            return ()
        return self.keys[..., : self.offset, :], self.values[..., : self.offset, :]

    @state.setter
    def state(self, value: tuple[mx.array, mx.array] | tuple[()]) -> None:
        self.keys, self.values = value or (None, None)
        self.offset = 0 if self.keys is None else self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes held, the room to grow included."""
        return 0 if self.keys is None else self.keys.nbytes + self.values.nbytes

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.keys is None

    def make_mask(self, n: int, window_size: int | None = None, return_array: bool = False):
        """The mask for `n` new positions, as models of mlx_lm ask for it: None, "causal" or bool `[n, S]`."""
        if n == 1 and window_size is None:
            return None
        if window_size is None and not return_array:
            return "causal"
        rows = mx.arange(self.offset, self.offset + n)[:, None]
        columns = mx.arange(self.offset + n)[None]
        mask = rows >= columns
        return mask if window_size is None else mask & (rows < columns + window_size)


def make_cache(model) -> list:
    """One cache per layer; a model that needs another kind (`model.make_cache`) says so itself."""
    return model.make_cache() if hasattr(model, "make_cache") else [KVCache() for _ in model.layers]
