"""Caches for models of mlx_lm's classes: ours, with what these models ask of a cache."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from mlxlm.backend.mlx import mx, nn
from mlxlm.cache.kv_cache import KVCache
from mlxlm.cache.options import KVOptions
from mlxlm.cache.policies import cache_policies
from mlxlm.cache.recurrent_cache import RecurrentCache
from mlxlm.kernels import QuantizedKV
from mlxlm.kernels.mask import causal_mask, relative_positions
from mlxlm.utils.errors import GenerationError


class MlxLmKeysAndValues:
    """What mlx_lm's models ask of keys and values: arrays, dequantized if they are quantized. A base of caches."""

    buffers: Any
    _first: int
    _end: int

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Append keys and values `[B, H_kv, T, D]`; return the visible ones."""
        keys, values = super().update_and_fetch(keys, values)  # type: ignore[misc]
        return self._form(keys), self._form(values)

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return what the last update did, for layers that share it."""
        keys, values = (buffer.read(self._first, self._end) for buffer in self.buffers)
        return self._form(keys), self._form(values)

    def _form(self, x: Any) -> Any:
        """Keys or values in the form that attention takes."""
        return x.dequantized() if isinstance(x, QuantizedKV) else x

    @property
    def keys(self) -> mx.array:
        """The buffer of keys, which some models make depend on that of another cache, to evaluate both."""
        return self.buffers[0].arrays[0]

    @keys.setter
    def keys(self, buffer: mx.array) -> None:
        self.buffers[0].arrays[0] = buffer

    @property
    def values(self) -> mx.array:
        """The buffer of values. DeepSeek V3.2 sets that of its indexer to zeros, which changes nothing."""
        return self.buffers[1].arrays[0]

    @values.setter
    def values(self, buffer: mx.array) -> None:
        pass


class PackedKeysAndValues(MlxLmKeysAndValues):
    """Keys and values of the same bits, in the form that mlx_lm's attention multiplies quantized."""

    def _form(self, x: Any) -> Any:
        """The packed values, scales and biases."""
        return x.arrays

    @property
    def bits(self) -> int:
        """Bits of keys and of values."""
        bits: int = self.buffers[0].quantization[0]
        return bits

    @property
    def group_size(self) -> int:
        """Values that share a scale."""
        size: int = self.buffers[0].quantization[1]
        return size


class MlxLmKVCache(MlxLmKeysAndValues, KVCache):
    """A cache of keys and values."""

    def make_mask(self, n: int, window_size: int | None = None, return_array: bool = False) -> mx.array | str | None:
        """Make the attention mask for `n` new positions per row.

        Returns:
            None, "causal", or a bool array `[n, S]`, with padded rows `[B, 1, n, S]`.
        """
        starts, before = self._starts or [0], self._end
        if self.rotation is not None:  # rows that would become too long drop tokens first
            size, step = self.rotation.size, self.rotation.step
            starts = [start + step if before - start + n > size else start for start in starts]
        first = min(before, *starts)
        if self.window is not None:
            window_size = window_size or self.window.size
            first = max(first, before - self.window.num_visible)
        length = before + n - first
        if window_size is not None and length <= window_size:
            window_size = None
        if max(starts) <= first and window_size is None and (n == 1 or not return_array):
            return None if n == 1 else "causal"
        rows = None if max(starts) <= first else mx.array([max(0, start - first) for start in starts])
        return causal_mask(relative_positions(n, length), window_size, rows)


class QuantizedMlxLmKVCache(PackedKeysAndValues, MlxLmKVCache):
    """A cache of quantized keys and values, which attention multiplies as they are."""


class MlxLmRecurrentCache(RecurrentCache):
    """A state whose rows are never padded, as few of mlx_lm's models read that; with what they ask for."""

    can_pad = False
    max_partial = 0  # they write the state after the last token only
    lengths = None

    def advance(self, count: int) -> None:
        """Do nothing; called after an update."""

    def make_mask(self, count: int) -> None:
        """Return None: no token is padding."""


def make_caches(model: nn.Module, options: KVOptions) -> list[Any]:
    """Make the caches of a model: one per layer, or those of its `make_cache`, one after another.

    Raises:
        GenerationError: The model has caches of other types than mlx_lm's KVCache, RotatingKVCache, ArraysCache and
            CacheList, and `options` are not the defaults.
    """
    quantized = options.key_bits is not None and options.key_bits == options.value_bits
    takes_quantized = quantized and _multiplies_quantized(model, options)
    caches = _translated(model, options, QuantizedMlxLmKVCache if takes_quantized else MlxLmKVCache)
    if None not in caches:
        return caches
    if options != KVOptions():
        raise GenerationError(
            "this architecture has its own cache type, which supports no size and no quantization",
            "no `size` and no `key_bits`",
            is_operator_hint=True,
        )
    return model.make_cache()


def _translated(model: Any, options: KVOptions, cache_type: type[MlxLmKVCache]) -> list[Any]:
    own = _flat(model.make_cache()) if hasattr(model, "make_cache") else [None] * len(model.layers)
    return [_translate(cache, options, cache_type) for cache in own]


def can_batch(model: Any) -> bool:
    """Whether rows of different lengths can share a batch, without computing anything.

    Not with caches of other types, nor if a model needs its position as a Python number.
    """
    try:
        rows = [make_caches(model, KVOptions()) for _ in range(2)]
        if not all(isinstance(cache, KVCache | RecurrentCache) for cache in rows[0]):
            return False
        for count, caches in zip((2, 1), rows, strict=True):
            model(mx.zeros((1, count), mx.int32), cache=caches)
        merged = [type(one).merge([one, other]) for one, other in zip(*rows, strict=True)]
        model(mx.zeros((2, 1), mx.int32), cache=merged)
    except Exception:  # whatever its code raises
        return False
    return True


def _flat(caches: Iterable[Any]) -> Iterable[Any]:
    for own in caches:
        if type(own).__name__ == "CacheList":
            yield from _flat(own.caches)
        else:
            yield own


def _translate(own: Any, options: KVOptions, cache_type: type[MlxLmKVCache]) -> Any:
    """Our cache for one of mlx_lm's, or for None, a layer of a model without `make_cache`; None for other types."""
    kind = "KVCache" if own is None else type(own).__name__
    if kind == "ArraysCache":
        return _recurrent_class(type(own))([None] * len(own.cache))  # type: ignore[arg-type]
    if kind not in ("KVCache", "RotatingKVCache") or getattr(own, "keep", False):
        return None
    window = own.max_size if kind == "RotatingKVCache" else None
    rotation, sliding = cache_policies(options, window)
    return cache_type(rotation=rotation, window=sliding, key_bits=options.key_bits, value_bits=options.value_bits)


@cache
def _recurrent_class(own: type) -> type[MlxLmRecurrentCache]:
    """A subclass of mlx_lm's ArraysCache, too: its Mamba updates no other cache."""
    return type("MlxLmArraysCache", (MlxLmRecurrentCache, own), {})


def _multiplies_quantized(model: Any, options: KVOptions) -> bool:
    """Whether a model's attention takes quantized keys and values, without computing anything."""
    if (known := getattr(model, "_multiplies_quantized", None)) is None:
        caches = _translated(model, options, QuantizedMlxLmKVCache)
        try:
            if None in caches:
                raise TypeError("caches of other types")
            for count in (2, 1):
                model(mx.zeros((1, count), mx.int32), cache=caches)
            known = True
        except Exception:  # whatever its code raises for tuples instead of arrays, or for attention sinks
            known = False
        model._multiplies_quantized = known
    return known
