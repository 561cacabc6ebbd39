"""Device memory while decoding: evaluation of caches, freed buffers, wired memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from mlxlm.backend import platform
from mlxlm.backend.mlx import ON_CPU, async_eval_arrays, eval_arrays, mx

T = TypeVar("T")
# Decoding steps between two calls of `clear_memory_cache`. 256 is the step in which caches grow on a GPU. On a CPU, 16
# is as fast, and 9,000 tokens take 0.35 GB instead of 0.55.
CLEAR_CACHE_INTERVAL = 16 if ON_CPU else 256
# Freed bytes that a CPU's allocator may keep; without a limit, 20,000 tokens of a small model leave 6 GB.
MAX_FREED_BYTES = 256 << 20


def async_eval(result: T) -> T:
    """Start to compute an array, or a tuple of arrays, and return it."""
    async_eval_arrays(result)
    return result


def eval_caches(caches: Sequence[Any], *arrays: mx.array, wait: bool = True) -> None:
    """Compute the state of `caches`, and `arrays`, and give freed buffers back.

    Without `wait`, a GPU computes while Python builds the next graph. MLX itself waits while more than ten command
    buffers are in flight, so this takes no more memory than one long graph.
    """
    evaluate = eval_arrays if wait or ON_CPU else async_eval_arrays
    evaluate([cache.state for cache in caches], *arrays)
    clear_memory_cache()


def clear_memory_cache() -> None:
    """Give freed buffers back: attention over a growing cache frees ever new sizes, which pile up in the allocator.

    On a CPU only above `MAX_FREED_BYTES`, or near the limit of the process, since fresh memory costs page faults there.
    """
    if not ON_CPU or mx.get_cache_memory() > MAX_FREED_BYTES:
        mx.clear_cache()
    if ON_CPU and "from" in _trimmed and platform.process_memory() > _trimmed["from"]:
        platform.trim_heap()


def trim_heap_from(num_bytes: int) -> None:
    """Have `clear_memory_cache` also return gaps of the heap while the process takes more than `num_bytes`.

    A prefix cache that is full evicts small buffers all the time: they left gaps of a quarter of its size.
    """
    _trimmed["from"] = num_bytes


_trimmed: dict[str, int] = {}
_wired: dict[str, Any] = {"users": 0, "previous_limit": None}


@contextmanager
def wired_limit() -> Iterator[None]:
    """On Metal, keep weights and caches resident: macOS would page out a large model between tokens.

    If several texts are generated at once, the first raises the limit and the last restores it. If macOS refuses the
    limit, a warning is given and nothing is kept.
    """
    if ON_CPU or not mx.metal.is_available():
        yield
        return
    if _wired["users"] == 0:
        _wired["previous_limit"] = _raise_wired_limit()
    _wired["users"] += 1
    try:
        yield
    finally:
        _wired["users"] -= 1
        if _wired["users"] == 0 and _wired["previous_limit"] is not None:
            mx.synchronize()  # the limit must not change during a step
            mx.set_wired_limit(_wired["previous_limit"])


def _raise_wired_limit() -> int | None:
    """Raise the limit to the recommended working set and return the previous one, or None if macOS refuses."""
    try:
        return mx.set_wired_limit(mx.device_info()["max_recommended_working_set_size"])
    except ValueError as error:
        warnings.warn(f"macOS can't keep the model in memory, so it may be slow: {error}", stacklevel=4)
        return None
