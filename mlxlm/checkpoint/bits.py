"""Floating-point values through their bits: on a CPU, MLX finds the largest of 33 million bfloat16 values in 160 ms,
numpy that of their bits in 9."""

from __future__ import annotations

import numpy as np

from mlxlm.backend.mlx import mx

_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
_LARGEST = 65504.0  # of float16


def bits_of(value: mx.array) -> np.ndarray:
    """The bits of an array as unsigned numbers; a view where MLX's memory can be seen."""
    return np.array(mx.contiguous(value).view(_UNSIGNED[value.dtype.size]), copy=False)


def bitwise_equal(a: mx.array, b: mx.array) -> bool:
    """Whether two arrays of one shape and dtype are equal to the bit."""
    return np.array_equal(bits_of(a), bits_of(b))


def max_abs(value: mx.array) -> float:
    """The largest magnitude of float16, bfloat16 or float32 values; NaN if one is NaN.

    Without their sign, the bits of floats are in the order of the values, NaN above infinity.
    """
    bits = bits_of(value)
    if not bits.size:
        return 0.0
    top = 1 << (8 * bits.itemsize - 1)
    positive = int(bits.view(f"i{bits.itemsize}").max())
    highest = int(bits.max())
    magnitude = max(positive, highest - top if highest >= top else 0)
    if value.dtype == mx.float16:
        return float(np.uint16(magnitude).view(np.float16))
    return float(np.uint32(magnitude << 16 if bits.itemsize == 2 else magnitude).view(np.float32))


def fits_float16(value: mx.array) -> bool:
    """Whether float16 has room for all values; NaN and infinity, which it has too, are another matter."""
    return value.dtype == mx.float16 or not _LARGEST < max_abs(value) < float("inf")
