"""The only import of MLX. All modules of mlxlm import it from here.

A fast BLAS is loaded first, since MLX binds `cblas_sgemm` to the library that the process already has.
"""

from __future__ import annotations

import gc
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from mlxlm.backend import blas, compiled_kernels, platform
from mlxlm.utils.errors import PlatformError

blas.load_blas()  # raises the error that mlxlm/__init__.py suppressed

try:
    import mlx.core as mx
    import mlx.optimizers as optim
    from mlx import nn
    from mlx.utils import tree_flatten, tree_map, tree_unflatten
except ImportError as error:
    raise PlatformError(f"MLX has no backend here ({error})", platform.INSTALL_BACKEND) from None

T = TypeVar("T")

# The folder of all versions and backends: CUDA's kernels are in it, too.
compiled_kernels.make_private(compiled_kernels.kernel_folder(mx.__version__).parents[1])

ON_CPU = mx.default_device() == mx.Device(mx.cpu)

if ON_CPU:
    compiled_kernels.remove_old_kernels(compiled_kernels.kernel_folder(mx.__version__))
    # By default MLX's CPU allocator keeps 32 MB of freed buffers. A training step allocates and frees gigabytes, and
    # each new buffer costs page faults: a float32 add over 8M elements takes 17 ms, and 2 ms with a large cache.
    mx.set_cache_limit(platform.total_memory() // 4)
    platform.map_large_buffers()
    if blas.mlx_imported_first and sys.platform == "linux":
        message = "mlx was imported before mlxlm and keeps its slow reference BLAS (try: import mlxlm first)"
        warnings.warn(message, stacklevel=2)
    elif problem := blas.blas_warning():
        warnings.warn(problem, stacklevel=2)


_COMPILER_ERRORS = ("Could not load C++ shared library", "Failed to compile function")  # mlx/backend/cpu/compiled.cpp


def compile_on_gpu(function: Callable[..., T]) -> Callable[..., T]:
    """`mx.compile`, where it saves launches. On a CPU, it would start g++ for each trace."""
    return function if ON_CPU else mx.compile(function)


def eval_arrays(*graphs: Any) -> None:
    """`mx.eval` that is retried once if a compiled kernel is truncated or Ctrl-C killed the compiler.

    On a CPU, an evaluation may start g++. A terminal's Ctrl-C also kills g++, so that the evaluation fails even if this
    process handles the signal.
    """
    _retry_compilation(mx.eval, graphs)


def async_eval_arrays(*graphs: Any) -> None:
    """`mx.async_eval` that is retried like `eval_arrays`."""
    _retry_compilation(mx.async_eval, graphs)


def _retry_compilation(evaluation: Callable[..., None], graphs: tuple[Any, ...]) -> None:
    try:
        evaluation(*graphs)
    except RuntimeError as error:
        if not any(message in str(error) for message in _COMPILER_ERRORS):
            raise
        compiled_kernels.remove_failed_kernel(str(error))
        evaluation(*graphs)


@contextmanager
def limit_buffer_cache() -> Iterator[None]:
    """On a CPU, let MLX keep only 256 MB of freed buffers, for loops over tensors that hardly reuse them."""
    if not ON_CPU:
        yield
        return
    previous = mx.set_cache_limit(1 << 28)
    try:
        yield
    finally:
        mx.set_cache_limit(previous)


def free_memory() -> None:
    """Free the memory of models that are no longer used: reference cycles keep them until Python collects those."""
    gc.collect()
    mx.clear_cache()


def eval_in_parallel(graphs: Iterable[Callable[[], T]]) -> Iterator[T]:
    """Evaluate independent graphs, a few at a time: on a CPU on two cores, where MLX otherwise uses one.

    Args:
        graphs: Functions that build an array or a tuple of arrays.

    Yields:
        The arrays, evaluated, in order.
    """
    streams = _streams() if ON_CPU else [mx.default_stream(mx.default_device())]
    pending: deque[T] = deque()
    for i, build in enumerate(graphs):
        with mx.stream(streams[i % len(streams)]):
            pending.append(build())
        mx.async_eval(pending[-1])
        if len(pending) > len(streams):
            mx.eval(pending[0])
            yield pending.popleft()
    mx.eval(*pending)
    yield from pending


def _streams() -> list[mx.Stream]:
    """Created once per thread, since MLX starts a thread for each stream and never ends it."""
    if not hasattr(_thread_local, "streams"):
        _thread_local.streams = [mx.new_stream(mx.cpu) for _ in range(min(2, platform.cpu_cores()))]
    return _thread_local.streams


_thread_local = threading.local()

__all__ = [
    "ON_CPU",
    "async_eval_arrays",
    "eval_arrays",
    "eval_in_parallel",
    "free_memory",
    "limit_buffer_cache",
    "mx",
    "nn",
    "optim",
    "tree_flatten",
    "tree_map",
    "tree_unflatten",
]
