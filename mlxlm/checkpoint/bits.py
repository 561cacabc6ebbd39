"""Compare floating-point values through their bits.

On a CPU, MLX needs 160 ms for the maximum of 33 million bfloat16 values, NumPy 9 ms for that of their bits.
"""

from __future__ import annotations

import numpy as np

from mlxlm.backend.mlx import mx

_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}
_MAX_FLOAT16 = 65504.0


def bits_of(value: mx.array) -> np.ndarray:
    """The bits of an array as unsigned integers, without a copy where NumPy can view MLX's memory."""
    return np.array(mx.contiguous(value).view(_UNSIGNED[value.dtype.size]), copy=False)


def bitwise_equal(a: mx.array, b: mx.array) -> bool:
    """Whether two arrays of the same shape and dtype have the same bits."""
    return np.array_equal(bits_of(a), bits_of(b))


def max_abs(value: mx.array) -> float:
    """The largest absolute value of float16, bfloat16 or float32 values; NaN if any is NaN.

    Without the sign, the bits of floats sort like their values, with NaN above infinity.
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
    """Whether all finite values are in the range of float16."""
    return value.dtype == mx.float16 or not _MAX_FLOAT16 < max_abs(value) < float("inf")
