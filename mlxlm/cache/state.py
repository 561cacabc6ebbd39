"""What is written of a cache, and what a cache takes back."""

from __future__ import annotations

from collections.abc import Mapping

from mlxlm.backend.mlx import mx
from mlxlm.cache.kv_buffer import KVBuffer
from mlxlm.cache.kv_cache import KVCache
from mlxlm.cache.rotation import Sink


def cache_arrays(cache: KVCache) -> tuple[dict[str, mx.array], int]:
    """The arrays of one text by names, and how many tokens were dropped. Raises ValueError for several texts."""
    if cache._keys is None or len(cache._starts) > 1:
        raise ValueError(f"{len(cache._starts)} texts, one can be saved")
    sides = {"keys": cache._held("_keys", cache._keys), "values": cache._held("_values", cache._values)}
    if sink := cache._sinks[0]:
        sides |= {"kept_keys": sink.keys, "kept_values": sink.values}
    arrays = {f"{name}.{i}": x for name, side in sides.items() for i, x in enumerate(side.arrays)}
    return arrays, cache._dropped[0]


def set_cache_arrays(cache: KVCache, arrays: Mapping[str, mx.array], dropped: int) -> None:
    """Hold what `cache_arrays` gave of a cache that was made alike, in the place of all else.

    Raises ValueError, and changes nothing, for arrays that such a cache can't have.
    """
    bits = {"keys": cache.key_bits, "values": cache.value_bits}
    sink = bool(dropped and cache.rotation and cache.rotation.keep)
    if sink:
        bits |= {"kept_keys": cache.key_bits, "kept_values": cache.value_bits}
    names = {side: [f"{side}.{i}" for i in range(1 if b is None else 3)] for side, b in bits.items()}
    if wrong := set(arrays) ^ {name for side in names.values() for name in side}:
        raise ValueError(f"unknown or missing: {', '.join(sorted(wrong))}")
    sides = {side: KVBuffer.of([arrays[name] for name in found], bits[side]) for side, found in names.items()}
    _check(cache, sides, dropped)
    cache.state = (*sides["keys"].arrays, *sides["values"].arrays)
    cache._dropped = [dropped]
    if sink:
        cache._sinks = [Sink(sides["kept_keys"], sides["kept_values"])]


def _check(cache: KVCache, sides: Mapping[str, KVBuffer], dropped: int) -> None:
    bound, held = cache.rotation or cache.window, sides["keys"].capacity
    B, H = sides["keys"].shape[:2]
    for side, store in sides.items():
        length = cache.rotation.keep if side.startswith("kept") else held
        like = sides[side.removeprefix("kept_")]
        if store.shape != (1, H, length, like.shape[3]) or store.dtype != sides["keys"].dtype:
            raise ValueError(f"{side} are {store.shape} {store.dtype} beside keys {sides['keys'].shape}")
    most = cache.rotation.size if cache.rotation else held
    least = bound.min_tokens_to_trim if dropped and bound else 1
    if B != 1 or not least <= held <= most or dropped < 0 or dropped % (cache.rotation.step if cache.rotation else 1):
        raise ValueError(f"{held} tokens after {dropped} that were dropped")
    if dropped and bound is None:
        raise ValueError(f"{dropped} tokens were dropped from a cache that drops none")
