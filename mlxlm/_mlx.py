"""The one place that imports MLX, with what it needs to run well here.

Every module of mlxlm takes MLX from here. The package has loaded a fast BLAS by then, and MLX binds
`cblas_sgemm` to whichever library the process already has.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from mlxlm import platform
from mlxlm.errors import PlatformError

platform.load_blas()  # a second call: the first one was in mlxlm/__init__.py; this one raises if it failed

try:
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim
    from mlx.utils import tree_flatten, tree_map, tree_unflatten
except ImportError as error:
    raise PlatformError(f"MLX has no backend here ({error})", platform.INSTALL_BACKEND) from None

ON_CPU = mx.default_device() == mx.Device(mx.cpu)

if ON_CPU:
    # MLX's CPU allocator keeps only 32 MB of freed buffers by default. A training step frees and takes
    # gigabytes, and each fresh buffer costs page faults: a float32 add over 8M elements takes 17 ms
    # without and 2 ms with a large enough cache.
    mx.set_cache_limit(platform.total_memory() // 4)
    if platform.mlx_came_first and sys.platform == "linux":
        late = "mlx was imported before mlxlm and keeps its slow reference BLAS (try: import mlxlm first)"
        warnings.warn(late, stacklevel=2)
    elif problem := platform.blas_warning():
        warnings.warn(problem, stacklevel=2)


@contextmanager
def small_cache() -> Iterator[None]:
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


__all__ = ["ON_CPU", "mx", "nn", "optim", "small_cache", "tree_flatten", "tree_map", "tree_unflatten"]
