"""Converts a cache to named arrays and back, for files."""

from __future__ import annotations

from collections.abc import Mapping

from mlxlm.backend.mlx import mx
from mlxlm.cache.kv_buffer import KVBuffer
from mlxlm.cache.kv_cache import KVCache
from mlxlm.cache.rotation import Sink


def cache_arrays(cache: KVCache) -> tuple[dict[str, mx.array], int]:
    """Return the arrays of a cache by name, and how many tokens it has dropped.

    Raises:
        ValueError: The cache has several rows.
    """
    if cache._keys is None or len(cache._starts) > 1:
        raise ValueError(f"only a cache of one text can be saved, this has {len(cache._starts)}")
    sides = {"keys": cache._filled("_keys", cache._keys), "values": cache._filled("_values", cache._values)}
    if sink := cache._sinks[0]:
        sides |= {"kept_keys": sink.keys, "kept_values": sink.values}
    arrays = {f"{name}.{i}": x for name, side in sides.items() for i, x in enumerate(side.arrays)}
    return arrays, cache._dropped[0]


def set_cache_arrays(cache: KVCache, arrays: Mapping[str, mx.array], dropped: int) -> None:
    """Replace the contents of a cache with the result of `cache_arrays` of one with the same settings.

    Raises:
        ValueError: A cache with these settings can't have such arrays. The cache is unchanged.
    """
    bits = {"keys": cache.key_bits, "values": cache.value_bits}
    sink = bool(dropped and cache.rotation and cache.rotation.keep)
    if sink:
        bits |= {"kept_keys": cache.key_bits, "kept_values": cache.value_bits}
    names = {side: [f"{side}.{i}" for i in range(1 if b is None else 3)] for side, b in bits.items()}
    if unexpected := set(arrays) ^ {name for side in names.values() for name in side}:
        raise ValueError(f"unknown or missing: {', '.join(sorted(unexpected))}")
    sides = {side: KVBuffer.of([arrays[name] for name in parts], bits[side]) for side, parts in names.items()}
    _check(cache, sides, dropped)
    cache.state = (*sides["keys"].arrays, *sides["values"].arrays)
    cache._dropped = [dropped]
    if sink:
        cache._sinks = [Sink(sides["kept_keys"], sides["kept_values"])]


def _check(cache: KVCache, sides: Mapping[str, KVBuffer], dropped: int) -> None:
    bound, length = cache.rotation or cache.window, sides["keys"].capacity
    B, H = sides["keys"].shape[:2]
    for side, buffer in sides.items():
        expected = cache.rotation.keep if side.startswith("kept") else length
        like = sides[side.removeprefix("kept_")]
        if buffer.shape != (1, H, expected, like.shape[3]) or buffer.dtype != sides["keys"].dtype:
            raise ValueError(f"{side} are {buffer.shape} {buffer.dtype}, but keys are {sides['keys'].shape}")
    maximum = cache.rotation.size if cache.rotation else length
    minimum = bound.min_tokens_to_trim if dropped and bound else 1
    if (
        B != 1
        or not minimum <= length <= maximum
        or dropped < 0
        or dropped % (cache.rotation.step if cache.rotation else 1)
    ):
        raise ValueError(f"{length} tokens can't follow {dropped} dropped ones")
    if dropped and bound is None:
        raise ValueError(f"{dropped} tokens were dropped from an unbounded cache")
