"""A vectorised float32 `exp` for MLX's CPU backend."""

from __future__ import annotations

import math
from functools import partial

from mlxlm.backend.mlx import mx

# x = k·ln 2 + r with |r| <= ln(2)/2; ln 2 in two parts, so that k·_LN2_HIGH is exact (Cody & Waite 1980).
_LN2_HIGH = 0.693359375
_LN2_LOW = math.log(2) - _LN2_HIGH
_TAYLOR = [1 / math.factorial(n) for n in range(7, -1, -1)]  # truncation error (ln 2 / 2)^8 / 8! = 5e-9
_LOWEST = -87.0  # exp of less would leave the normal numbers: 1.6e-38 stands for every smaller value


def exp_nonpositive(x: mx.array) -> mx.array:
    """exp(x) for float32 x <= 0, to 4e-7 relative; x below -87, -inf included, gives 1.6e-38. NaN stays.

    Why not `mx.exp`: the CPU backend evaluates that one element at a time, 12 ns each. These additions,
    multiplications and shifts are vectorised by the compiler of `mx.compile`: 2 ns.
    """
    fraction, exponent = _split(x)
    return fraction * exponent.view(mx.float32)


@partial(mx.compile, shapeless=True)  # one trace for all shapes: prompts come in every length
def _split(x: mx.array) -> tuple[mx.array, mx.array]:
    """exp(r) and the bits of the float 2^k."""
    x = mx.maximum(x, _LOWEST)
    k = (x * (1 / math.log(2)) - 0.5).astype(mx.int32)  # truncation rounds a negative number to nearest
    whole = k.astype(mx.float32)
    r = (x - whole * _LN2_HIGH) - whole * _LN2_LOW
    p = _TAYLOR[0]
    for c in _TAYLOR[1:]:
        p = p * r + c
    return p, (k + 127) << 23
