"""The one place that imports MLX, with what it needs to run well here.

Every module of mlxlm takes `mx` and `nn` from here, so that the BLAS is always loaded first:
MLX binds `cblas_sgemm` to whichever library the process already has.
"""

from __future__ import annotations

import sys

from mlxlm import platform
from mlxlm.errors import PlatformError

if "mlx.core" not in sys.modules:
    platform.load_blas()

try:
    import mlx.core as mx
    import mlx.nn as nn
except ImportError as error:
    raise PlatformError(f"MLX has no backend here ({error})", platform.INSTALL_BACKEND) from None

ON_CPU = mx.default_device() == mx.Device(mx.cpu)

if ON_CPU:
    # MLX's CPU allocator keeps only 32 MB of freed buffers by default. A training step frees and takes
    # gigabytes, and each fresh buffer costs page faults: a float32 add over 8M elements takes 17 ms
    # without and 2 ms with a large enough cache.
    mx.set_cache_limit(platform.total_memory() // 4)

__all__ = ["ON_CPU", "mx", "nn"]
