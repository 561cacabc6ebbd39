"""Converts caches to arrays and back, for files and the prefix cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

from mlxlm.backend.mlx import mx
from mlxlm.cache.kv_buffer import KVBuffer
from mlxlm.cache.kv_cache import KVCache

_SIDES = ("keys", "values", "kept_keys", "kept_values")


def cache_arrays(cache: KVCache) -> tuple[dict[str, mx.array], int]:
    """Return the arrays of a cache of one text by name, and how many tokens it has dropped."""
    buffers = [*cache._filled(), *cache._sinks[0]]
    arrays = (
        (f"{side}.{i}", x) for side, buffer in zip(_SIDES, buffers, strict=False) for i, x in enumerate(buffer.arrays)
    )
    return dict(arrays), cache._dropped[0]


def set_cache_arrays(cache: KVCache, arrays: Mapping[str, mx.array], dropped: int) -> None:
    """Replace the contents of a cache with the result of `cache_arrays` of one with the same settings.

    Raises:
        ValueError: A cache with these settings can't have such arrays. The cache is unchanged.
    """
    keep = cache.rotation.keep if cache.rotation and dropped else 0
    bits = dict(zip(_SIDES if keep else _SIDES[:2], (cache.key_bits, cache.value_bits) * 2, strict=False))
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
    _check_length(cache, length, dropped)
    cache.state = (*keys.arrays, *values.arrays)
    cache._dropped, cache._sinks = [dropped], [sinks]


def _check_length(cache: KVCache, length: int, dropped: int) -> None:
    bound = cache.rotation or cache.window
    minimum = bound.min_tokens_to_trim if bound and dropped else 1
    maximum, step = (cache.rotation.size, cache.rotation.step) if cache.rotation else (length, 1)
    if not minimum <= length <= maximum or dropped % step or (dropped and bound is None):
        raise ValueError(f"{length} tokens can't follow {dropped} dropped ones")


def holds_all_tokens(cache: KVCache) -> bool:
    """Whether a cache of one text holds every token, so that it can be cut at any of them.

    False for a sliding window, which drops tokens that a shorter text would see.
    """
    return cache.window is None and not any(cache._dropped)


def slice_tokens(cache: KVCache, first: int, end: int) -> list[KVBuffer]:
    """Copy keys and values of these tokens of a cache that holds all tokens of one text."""
    start = cache._starts[0]
    return [buffer.slice_row(0, start + first, start + end) for buffer in cache._buffers]


def fill_cache(cache: KVCache, pieces: Sequence[Sequence[KVBuffer]], room: int) -> None:
    """Fill an empty cache with the consecutive pieces of one text, and make room for `room` more tokens."""
    length = sum(keys.capacity for keys, _ in pieces)
    capacity = cache._capacity(length, room if cache.rotation is None else min(room, cache.rotation.size - length))
    cache._begin(1)
    cache._buffers = [KVBuffer.join(side, capacity) for side in zip(*pieces, strict=True)]
    cache._end = length


def compact_copy(cache: KVCache) -> KVCache:
    """Copy a cache of one text, without unused capacity."""
    other = cache.row(0)
    other._buffers = [buffer.map_arrays(mx.contiguous) for buffer in other._buffers]
    return other
