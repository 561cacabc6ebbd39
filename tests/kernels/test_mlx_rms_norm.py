"""RMSNorm of MLX operations, values and gradients against float64 numpy; alone, compiled and recomputed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from mlxlm.kernels import add_rms_norm, rms_norm
from tests import oracle

TOLERANCE = 2e-6  # of float32, beside the sum of the sizes of the terms


def arrays(shape, N, seed=0):
    rng = np.random.default_rng(seed)
    x, residual, g, f = (rng.normal(0, 1, (*shape, N)).astype(np.float32) for _ in range(4))
    return x, residual, rng.normal(1, 0.3, N).astype(np.float32), g, f


def close(found, wanted, size=30.0):
    assert found.shape == wanted.shape
    assert (np.abs(np.array(found) - np.array(wanted)) <= TOLERANCE * size).all()


@settings(max_examples=20)
@given(
    shape=st.lists(st.integers(1, 20), max_size=3).map(tuple),
    N=st.sampled_from([1, 3, 64, 255, 700]),
    eps=st.sampled_from([1e-6, 1e-2]),
)
def test_values_and_gradients_equal_float64(shape, N, eps):
    x, residual, weight, g, f = arrays(shape, N)

    def total(x, residual, weight):
        h, y = add_rms_norm(x, residual, weight, eps)
        return (mx.array(f) * h + mx.array(g) * y).sum(), (h, y)

    primals = [mx.array(a) for a in (x, residual, weight)]
    (_, (h, y)), (dx, d_residual, dw) = mx.value_and_grad(total, (0, 1, 2))(*primals)
    assert np.array_equal(np.array(h), x + residual) and mx.array_equal(dx, d_residual)
    h, weight, g = (a.astype(np.float64) for a in (x + residual, weight, g))
    dh, dw64 = oracle.rms_norm_grad(h, weight, eps, g)
    wanted = oracle.rms_norm(h, weight, eps), dh + f, dw64
    size_dh, size_dw = oracle.rms_norm_grad_size(h, weight, eps, g)
    sizes = np.abs(wanted[0]), size_dh + np.abs(f), size_dw
    for found, exact, size in zip((y, dx, dw), wanted, sizes, strict=True):
        close(found, exact, size)


def test_gradients_under_compile_and_checkpoint():
    x, residual, weight, g, f = (mx.array(a) for a in arrays((4, 40), 100))

    def total(x, residual, weight):
        h, y = add_rms_norm(x, residual, weight, 1e-5)
        return (f * h + g * y).sum()

    plain = mx.grad(total, (0, 1, 2))
    for other in (mx.compile(plain), mx.grad(mx.checkpoint(total), (0, 1, 2))):
        for a, b in zip(other(x, residual, weight), plain(x, residual, weight), strict=True):
            close(a, b)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_dtypes_promote_as_in_mlx(dtype):
    x = mx.array(arrays((40,), 128)[0]).astype(dtype)
    for weight in (mx.ones(128, dtype), mx.ones(128)):
        h, y = add_rms_norm(x, x, weight, 1e-5)
        assert h.dtype == dtype and y.dtype == mx.fast.rms_norm(x, weight, 1e-5).dtype
        assert mx.array_equal(y, mx.fast.rms_norm(h, weight, 1e-5))


def test_no_rows():
    empty, weight = mx.zeros((2, 0, 8)), mx.ones(8)
    assert rms_norm(empty, weight, 1e-5).shape == (2, 0, 8)
    h, y = add_rms_norm(empty, empty, weight, 1e-5)
    assert h.shape == y.shape == (2, 0, 8)
