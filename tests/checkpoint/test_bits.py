"""Values through their bits, against MLX's own conversions."""

import math

import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.bits import bitwise_equal, fits_float16, max_abs

DTYPES = [mx.float16, mx.bfloat16, mx.float32]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_magnitude(dtype):
    for values, expected in (
        ([0.5, -3.0, 2.0], 3.0), ([0.5, -1.0, 2.0], 2.0), ([-0.0], 0.0), ([-2.0, -7.0], 7.0), ([], 0.0),
        ([1.0, float("inf")], math.inf), ([-float("inf"), 4.0], math.inf),
    ):  # fmt: skip
        assert max_abs(mx.array(values, dtype=dtype)) == expected
    assert math.isnan(max_abs(mx.array([1.0, float("nan"), 2.0], dtype=dtype)))
    assert max_abs(mx.array([[1.0, 2.0], [-5.0, 3.0]], dtype=dtype).T[1]) == 3.0  # not contiguous


def test_what_fits_into_float16():
    assert fits_float16(mx.array([65504.0, -65504.0])) and fits_float16(mx.array([float("nan"), float("inf")]))
    assert not fits_float16(mx.array([70000.0])) and not fits_float16(mx.array([-70000.0], dtype=mx.bfloat16))


def test_equal_to_the_bit():
    assert bitwise_equal(mx.array([1.0, float("nan")]), mx.array([1.0, float("nan")]))
    assert not bitwise_equal(mx.array([0.0]), mx.array([-0.0]))
    assert bitwise_equal(mx.array([1, 2], dtype=mx.int64), mx.array([1, 2], dtype=mx.int64))
