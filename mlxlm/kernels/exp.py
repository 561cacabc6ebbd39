"""Fast `exp` and row sums for the softmax on MLX's CPU backend; elsewhere MLX's own."""

from __future__ import annotations

import math
from functools import partial

from mlxlm.backend.mlx import ON_CPU, mx

# x = k·ln 2 + r with |r| <= ln(2)/2. ln 2 has two parts, so that k·_LN2_HIGH is exact (Cody & Waite 1980).
_LN2_HIGH = 0.693359375
_LN2_LOW = math.log(2) - _LN2_HIGH
_TAYLOR = [1 / math.factorial(n) for n in range(7, -1, -1)]  # truncation error (ln 2 / 2)^8 / 8! = 5e-9
_LOWEST = -87.0  # the result would be subnormal below this; smaller values give 1.6e-38


def exp_nonpositive(x: mx.array) -> mx.array:
    """Compute exp(x) for float32 x <= 0, on a CPU with a relative error of at most 4e-7.

    On a CPU, x below -87, including -inf, gives 1.6e-38; NaN stays NaN. MLX's CPU backend evaluates `mx.exp` one
    element at a time, 12 ns each. The additions, multiplications and shifts here are vectorised by `mx.compile`: 2 ns.
    """
    if not ON_CPU:
        return mx.exp(x)
    fraction, exponent = _split(x)
    return fraction * exponent.view(mx.float32)


@partial(mx.compile, shapeless=True)  # one trace for all shapes, since prompts have many lengths
def _split(x: mx.array) -> tuple[mx.array, mx.array]:
    """Return exp(r) and the bits of the float 2^k."""
    x = mx.maximum(x, _LOWEST)
    k = (x * (1 / math.log(2)) - 0.5).astype(mx.int32)  # with -0.5, truncation rounds negative numbers to the nearest
    whole = k.astype(mx.float32)
    r = (x - whole * _LN2_HIGH) - whole * _LN2_LOW
    p = _TAYLOR[0]
    for c in _TAYLOR[1:]:
        p = p * r + c
    return p, (k + 127) << 23


def row_sums(x: mx.array) -> mx.array:
    """Sum float32 x `[..., n]` over the last axis, with keepdims.

    On a CPU, this is a product with ones: BLAS takes 0.1 ns per value, `mx.sum` 0.4.
    """
    return x @ mx.ones((x.shape[-1], 1)) if ON_CPU else mx.sum(x, axis=-1, keepdims=True)
