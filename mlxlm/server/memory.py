"""The memory that `--max-memory` allows: what the process itself takes, and what is left for each model."""

from __future__ import annotations

from collections.abc import Iterable

from mlxlm.backend import platform
from mlxlm.backend.mlx import mx
from mlxlm.generation.device_memory import MAX_FREED_BYTES, trim_heap_from

_FREED_SHARE = 1 / 16  # of the limit, for buffers that MLX keeps after they were freed
# Measured with four agents at work, 108 MB: modules that are imported with the first model and request, the tokenizer,
# grammars, threads' stacks and malloc's arenas, and bodies of requests.
_GROWTH = 112 << 20


def limit_process(max_memory: int) -> int:
    """Limit the memory that MLX takes, before any model is loaded.

    Returns:
        The bytes of `max_memory` that aren't left for models: the process as it is, what it grows by, and what MLX
        keeps of freed buffers.
    """
    freed = min(MAX_FREED_BYTES, int(max_memory * _FREED_SHARE))
    mx.set_cache_limit(freed)
    trim_heap_from(max_memory * 3 // 4)
    process = platform.process_memory() + _GROWTH
    mx.set_memory_limit(max(1, max_memory - process))
    return process + freed


def share(max_memory: int, process: int, weights: Iterable[int]) -> int:
    """The bytes that each of some models has for everything but its weights; below 0 if the weights don't fit.

    Args:
        max_memory: The limit of the process.
        process: See `limit_process`.
        weights: Bytes of the weights of each model, at least one.
    """
    sizes = list(weights)
    return (max_memory - process - sum(sizes)) // len(sizes)
