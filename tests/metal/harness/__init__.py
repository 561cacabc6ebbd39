"""Runs custom Metal kernels on a Linux CPU and checks every load and store. README.md describes how to use it.

A launch goes through these steps:

1. `signature.py` generates the function signature that MLX generates.
2. `translate.py` rewrites Metal to clang's "C++ for OpenCL", which has the same address spaces.
3. `build.py` compiles it with our implementation of Metal's standard library (`metal_*.h`).
4. `metal_rules.py` reports code that clang accepts but Metal's compiler rejects.
5. `run.py` and `runtime/` run it, one fiber per thread. Clang's ThreadSanitizer instrumentation reports each access.
"""

from .api import Log, metal_kernel, use
from .build import available
from .fault import Fault
from .run import Launch

__all__ = ["Fault", "Launch", "Log", "available", "metal_kernel", "use"]
