"""The memory of a run, which is to stay what its steps need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mlxlm.backend import device
from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.generation.decoding import wired_limit

_AT_FIRST = 1 << 30  # bytes that MLX keeps free on a CPU until a step has shown what it needs


@contextmanager
def memory_limits() -> Iterator[None]:
    """Limits for a run, put back afterwards: on a CPU of what MLX keeps free, on Metal of what it takes in all.

    On Metal it takes no more than macOS recommends (shared by processes that `--num-processes` starts), which stays in memory.
    MLX's own limit there is 1.5 times that: it would keep freed buffers until the machine pages, and only then give
    them back. Nobody has measured this yet.
    """
    if ON_CPU:
        kept = mx.set_cache_limit(_AT_FIRST)
        try:
            yield
        finally:
            mx.set_cache_limit(kept)
    elif mx.metal.is_available():
        before = mx.set_memory_limit(device.device_memory())
        try:
            with wired_limit():
                yield
        finally:
            mx.set_memory_limit(before)
    else:
        yield


def limit_buffer_cache() -> None:
    """After a first step: on a CPU, let MLX keep as many bytes of freed buffers as were in use at most.

    More would not fit the buffers that come: attention in blocks asks for one of another size in each block. With a
    quarter of the memory for them, steps of 8,192 tokens that use 1.3 GB had 5.4 GB; of 4,096 tokens, using 0.55 GB,
    1.6 GB instead of 1.3, for 3.6 seconds of the processor instead of 3.9.
    """
    if ON_CPU:
        mx.set_cache_limit(mx.get_peak_memory())
