"""The memory of a run, which is to stay what its first steps need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mlxlm._mlx import mx
from mlxlm.generation.engine import wired_memory


@contextmanager
def steady_memory() -> Iterator[None]:
    """On Metal, let MLX take no more than macOS recommends, which stays in memory; elsewhere change nothing.

    MLX's own limit is 1.5 times that: it would keep freed buffers until the machine pages, and only then give them
    back. Nobody has measured this yet.
    """
    if not mx.metal.is_available():
        yield
        return
    before = mx.set_memory_limit(mx.device_info()["max_recommended_working_set_size"])
    try:
        with wired_memory():
            yield
    finally:
        mx.set_memory_limit(before)
