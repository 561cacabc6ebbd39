"""Runs the Metal kernels of `metal_kernels/` on a Linux CPU, and watches what they do.

A body is given the signature that MLX gives it (signature.py), is translated to a C++ dialect that has Metal's
address spaces (translate.py), compiled with a stand-in for Metal's standard library (build.py, metal_stdlib.h), held
against rules of Metal that clang does not know (audit.py), and run one fiber per thread (run.py, runtime/). Every
load and store is checked: bounds, initialisation, data races, with barriers understood as in Metal; every collective
for divergence; every index into an array of known length. What goes wrong raises Fault. plants.py lists the alarms.

Not seen: speed, registers, occupancy; the rounding of Apple's functions and matrix units and their order of summation;
what Apple's compiler refuses beyond the rules here; an index that is off by more than three times the largest buffer
and so hits another one; the alignment of threadgroup arrays; an uninitialised number that max or min drops; a race on
a path that no thread of the run takes; accesses of more than 16 bytes. Atomics, textures, quad functions and
threadgroup memory sized at launch do not compile. A vector in threadgroup memory must be written as a whole.
"""

from .api import Log, metal_kernel, use
from .build import available
from .fault import Fault
from .run import Launch

__all__ = ["Fault", "Launch", "Log", "available", "metal_kernel", "use"]
