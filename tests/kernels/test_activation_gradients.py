"""Activations in training with half precision: their gradients, and the kernels that they take."""

import math

import numpy as np
import pytest

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.kernels import gelu, gelu_tanh, swiglu, with_fused_gradients
from tests import oracle
from tests.graphs import operations

pytestmark = pytest.mark.skipif(ON_CPU, reason="on a CPU, these functions have gradients of their own")
_erf = np.vectorize(math.erf)


def swiglu64(gate, up):
    s = 1 / (1 + np.exp(-gate))
    return gate * s * up, [up * (s + gate * s * (1 - s)), gate * s]


def gelu64(x):
    cdf = (1 + _erf(x / math.sqrt(2))) / 2
    return x * cdf, [cdf + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)]


def gelu_tanh64(x):
    slope, cubic = math.sqrt(2 / math.pi), 0.044715
    t = np.tanh(slope * (x + cubic * x**3))
    return x * (1 + t) / 2, [(1 + t) / 2 + x / 2 * (1 - t * t) * slope * (1 + 3 * cubic * x * x)]


CASES = pytest.mark.parametrize(
    "function, exact, count", [(swiglu, swiglu64, 2), (gelu, gelu64, 1), (gelu_tanh, gelu_tanh64, 1)]
)


def random(count, dtype):
    return [(3 * mx.random.normal((4096,), key=mx.random.key(i))).astype(dtype) for i in range(count)]


@pytest.mark.parametrize("dtype, tolerance", [(mx.bfloat16, 2**-7), (mx.float16, 2**-10)])
@CASES
def test_values_and_gradients(function, exact, count, dtype, tolerance):
    *args, cotangent = random(count + 1, dtype)
    value, derivatives = exact(*map(oracle.as64, args))
    wanted = [value, *(oracle.as64(cotangent) * derivative for derivative in derivatives)]
    outputs, gradients = mx.vjp(with_fused_gradients(function), args, [cotangent])
    for found, expected in zip(outputs + gradients, wanted, strict=True):
        assert found.dtype == dtype
        assert np.abs(oracle.as64(found) - expected).max() <= tolerance * np.abs(expected).max()


@CASES
def test_a_training_step_takes_one_kernel_for_the_value_and_for_each_gradient(function, exact, count):
    def value_and_gradients(args, cotangent):
        outputs, gradients = mx.vjp(with_fused_gradients(function), args, [cotangent])
        return outputs + gradients

    *args, cotangent = random(count + 1, mx.bfloat16)
    mx.eval(args, cotangent)
    results = mx.compile(value_and_gradients)(args, cotangent)
    launched = [name for name in operations(results) if name not in ("CustomTransforms", "Depends")]
    assert len(launched) == 1 + count and all(name.startswith("Compiled") for name in launched)
