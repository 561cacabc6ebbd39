"""The one place that imports MLX, with what it needs to run well here.

Every module of mlxlm takes MLX from here. The package has loaded a fast BLAS by then, and MLX binds
`cblas_sgemm` to whichever library the process already has.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from mlxlm.backend import blas, compiled_kernels, platform
from mlxlm.utils.errors import PlatformError

blas.load_blas()  # a second call: the first one was in mlxlm/__init__.py; this one raises if it failed

try:
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim
    from mlx.utils import tree_flatten, tree_map, tree_unflatten
except ImportError as error:
    raise PlatformError(f"MLX has no backend here ({error})", platform.INSTALL_BACKEND) from None

T = TypeVar("T")

ON_CPU = mx.default_device() == mx.Device(mx.cpu)

if ON_CPU:
    compiled_kernels.remove_corrupt_kernels(compiled_kernels.kernel_folder(mx.__version__))
    # MLX's CPU allocator keeps only 32 MB of freed buffers by default. A training step frees and takes
    # gigabytes, and each fresh buffer costs page faults: a float32 add over 8M elements takes 17 ms
    # without and 2 ms with a large enough cache.
    mx.set_cache_limit(platform.total_memory() // 4)
    if blas.mlx_came_first and sys.platform == "linux":
        late = "mlx was imported before mlxlm and keeps its slow reference BLAS (try: import mlxlm first)"
        warnings.warn(late, stacklevel=2)
    elif problem := blas.blas_warning():
        warnings.warn(problem, stacklevel=2)


_KILLED = ("Could not load C++ shared library", "Failed to compile function")  # mlx/backend/cpu/compiled.cpp


def eval_arrays(*graphs: Any) -> None:
    """`mx.eval`, also where a Ctrl-C kills the compiler.

    On a CPU an evaluation may start g++. A terminal's Ctrl-C reaches every process of the group: g++ dies of it, and
    the evaluation with g++, even where this process means to go on. What has not been computed can be begun once more.
    """
    _compiled_again(mx.eval, graphs)


def async_eval_arrays(*graphs: Any) -> None:
    """`mx.async_eval`, as `eval_arrays`."""
    _compiled_again(mx.async_eval, graphs)


def _compiled_again(evaluation: Callable[..., None], graphs: tuple[Any, ...]) -> None:
    try:
        evaluation(*graphs)
    except RuntimeError as error:
        if not any(words in str(error) for words in _KILLED):
            raise
        compiled_kernels.remove_failed_kernel(str(error))
        evaluation(*graphs)


@contextmanager
def limit_buffer_cache() -> Iterator[None]:
    """On a CPU, let MLX keep 256 MB of freed buffers: for work on one tensor after another, whose buffers hardly fit
    the next."""
    if not ON_CPU:
        yield
        return
    before = mx.set_cache_limit(1 << 28)
    try:
        yield
    finally:
        mx.set_cache_limit(before)


def eval_in_parallel(graphs: Iterable[Callable[[], T]]) -> Iterator[T]:
    """What each function of `graphs` builds (an array, or a tuple of them), evaluated, in order.

    A few are in work at a time: on a CPU on two cores, where MLX otherwise takes one.
    """
    streams = _streams() if ON_CPU else [mx.default_stream(mx.default_device())]
    started: deque[T] = deque()
    for i, build in enumerate(graphs):
        with mx.stream(streams[i % len(streams)]):
            started.append(build())
        mx.async_eval(started[-1])
        if len(started) > len(streams):
            mx.eval(started[0])
            yield started.popleft()
    mx.eval(*started)
    yield from started


def _streams() -> list[mx.Stream]:
    """Made once for each thread: MLX starts a thread for each and never ends it."""
    if not hasattr(_own, "streams"):
        _own.streams = [mx.new_stream(mx.cpu) for _ in range(min(2, platform.cpu_cores()))]
    return _own.streams


_own = threading.local()

__all__ = [
    "ON_CPU",
    "async_eval_arrays",
    "eval_arrays",
    "eval_in_parallel",
    "mx",
    "nn",
    "optim",
    "limit_buffer_cache",
    "tree_flatten",
    "tree_map",
    "tree_unflatten",
]
