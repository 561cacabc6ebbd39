"""The RMSNorm kernels against float64 numpy: values, gradients and memory traffic."""

import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from mlxlm.kernels.rms_norm import _forward_teams, _teams, add_rms_norm_metal, rms_norm_metal
from tests import oracle
from tests.metal import harness

# Largest error beside the sum of the sizes of the terms: half a unit in the last place for the result, and
# in float32 some of these for the reductions.
TOLERANCE = {mx.float32: 2e-6, mx.float16: 2**-11 * 1.02, mx.bfloat16: 2**-8 * 1.02}
TINY = {mx.float32: 1e-30, mx.float16: 2**-24, mx.bfloat16: 1e-30}  # below the normal numbers
DTYPES = [(mx.float32, mx.float32), (mx.float16, mx.float16), (mx.bfloat16, mx.bfloat16), (mx.bfloat16, mx.float32)]
EPS = 1e-5

some = settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make(shape, N, dtypes, seed=0, scale=1.0):
    """x, residual, weight and two cotangents, h's and y's."""
    rng = np.random.default_rng(seed)
    dtype, weight_dtype = dtypes

    def normal(mean, deviation, shape, dtype):
        return mx.array(rng.normal(mean, deviation, shape).astype(np.float32)).astype(dtype)

    x, residual, dh = (normal(0, s, (*shape, N), dtype) for s in (scale, scale, 1))
    weight = normal(1, 0.3, N, weight_dtype)
    return x, residual, weight, dh, normal(0, 1, (*shape, N), mx.result_type(x, weight))


def check(found, wanted, size):
    """`size`: that of the terms which `wanted` is a sum of."""
    tolerance = TOLERANCE[found.dtype] * size + TINY[found.dtype]
    error = np.abs(oracle.as64(found) - wanted)
    assert found.shape == wanted.shape and (error <= tolerance).all(), f"{(error / tolerance).max()} x the tolerance"


def check_gradient(dx, dw, x, weight, dy, dh=0.0):
    """Of sum(dy * rms_norm(x)), dh added to the first."""
    x, weight, dy = oracle.as64(x), oracle.as64(weight), oracle.as64(dy)
    dh = dh if isinstance(dh, float) else oracle.as64(dh)
    wanted, wanted_dw = oracle.rms_norm_grad(x, weight, EPS, dy)
    size, size_dw = oracle.rms_norm_grad_size(x, weight, EPS, dy)
    check(dx, wanted + dh, size + np.abs(dh))
    check(dw, wanted_dw, size_dw)


def norm_and_gradient(x, weight, dy):
    outputs, gradients = mx.vjp(lambda x, w: rms_norm_metal(x, w, EPS), [x, weight], [dy])
    return [*outputs, *gradients]


def add_norm_and_gradient(x, residual, weight, dh, dy):
    outputs, gradients = mx.vjp(lambda *p: list(add_rms_norm_metal(*p, EPS)), [x, residual, weight], [dh, dy])
    return [*outputs, *gradients]


def check_norm(x, weight, dy):
    y, dx, dw = norm_and_gradient(x, weight, dy)
    assert y.dtype == dy.dtype and dx.dtype == x.dtype and dw.dtype == weight.dtype
    wanted = oracle.rms_norm(oracle.as64(x), oracle.as64(weight), EPS)
    check(y, wanted, np.abs(wanted))
    check_gradient(dx, dw, x, weight, dy)


def check_add_norm(x, residual, weight, dh, dy):
    h, y, dx, d_residual, dw = add_norm_and_gradient(x, residual, weight, dh, dy)
    assert y.dtype == dy.dtype and mx.array_equal(h, x + residual) and mx.array_equal(dx, d_residual)
    wanted = oracle.rms_norm(oracle.as64(h), oracle.as64(weight), EPS)
    check(y, wanted, np.abs(wanted))
    check_gradient(dx, dw, h, weight, dy, dh)


# Each combination of dtypes, CHUNKS and WIDE is a kernel to compile, so the tests use few of them: all dtypes, but
# float32 alone for most lengths.
narrow, wide = st.integers(1, 128), st.integers(513, 1100) | st.sampled_from([513, 1024])
shapes, scales = st.lists(st.integers(1, 8), max_size=3).map(tuple), st.sampled_from([1e-3, 1.0, 100.0])
kinds = st.one_of(
    st.tuples(narrow | st.integers(257, 512) | wide, st.just(DTYPES[0])),
    st.tuples(narrow, st.sampled_from([DTYPES[1], DTYPES[3]])),
    st.tuples(wide, st.just(DTYPES[2])),
)


@some
@given(shape=shapes, kind=kinds, scale=scales)
def test_norm_equals_float64(metal, shape, kind, scale):
    x, _, weight, _, dy = make(shape, *kind, scale=scale)
    check_norm(x, weight, dy)


@some
@given(shape=shapes, kind=kinds, scale=scales)
def test_add_and_norm_equals_float64(metal, shape, kind, scale):
    check_add_norm(*make(shape, *kind, scale=scale))


@pytest.mark.parametrize("N", [1536, 4099, 8192, 12288, 16385])
def test_rows_in_registers_and_longer_ones(metal, N):
    """Lengths that fill all threads exactly, and others; with two tiles in the gradient, and longer than 16384."""
    x, residual, weight, dh, dy = make((3,), N, DTYPES[0])
    check_norm(x, weight, dy)
    check_add_norm(x, residual, weight, dh, dy)


def test_long_rows_are_normalized_after_rounding_the_sum(metal):
    """In bfloat16, so that the norm of the sum before rounding is not within the tolerance."""
    check_add_norm(*make((2,), 16385, DTYPES[2]))


@pytest.mark.parametrize("N", [12, 600, 8200])
def test_teams_with_many_rows(metal, monkeypatch, N):
    """Few teams, as with thousands of rows, so that each has up to 16 or 32 rows, and some one less."""
    module = sys.modules[rms_norm_metal.__module__]
    monkeypatch.setattr(module, "_FORWARD_TEAMS", 2)
    monkeypatch.setattr(module, "_GRADIENT_TEAMS", 2)
    for rows in (94, 96):
        x, residual, weight, dh, dy = make((rows,), N, DTYPES[0])
        check_norm(x, weight, dy)
        check_add_norm(x, residual, weight, dh, dy)


def test_any_layout_and_mixed_dtypes(metal):
    """Transposed, broadcast and strided arguments; x and residual of two dtypes."""
    x, residual, weight, dh, dy = make((6, 5), 40, DTYPES[0])
    turned = x.swapaxes(0, 1)
    y, dx, _ = norm_and_gradient(turned, weight, mx.broadcast_to(dy[0, 0], turned.shape))
    wanted = oracle.rms_norm(oracle.as64(turned), oracle.as64(weight), EPS)
    check(y, wanted, np.abs(wanted))
    assert dx.shape == turned.shape
    h, y = add_rms_norm_metal(x[:, ::2], residual[:, ::2].astype(mx.float16), weight[::-1], EPS)
    assert h.dtype == y.dtype == mx.float32 and h.shape == (6, 3, 40)
    wanted = oracle.rms_norm(oracle.as64(h), oracle.as64(weight[::-1]), EPS)
    check(y, wanted, np.abs(wanted))
    h, y, dx, d_residual, _ = add_norm_and_gradient(x, residual.astype(mx.bfloat16), weight, dh, dy)
    assert dx.dtype == mx.float32 and d_residual.dtype == mx.bfloat16
    assert mx.array_equal(dx.astype(mx.bfloat16), d_residual)


@pytest.mark.parametrize("N", [64, 600])
def test_extremes(metal, N):
    """Zeros stay 0, NaN stays in its row, a row with squares beyond float32 becomes 0; large float16 values don't."""
    x = np.random.default_rng(0).normal(0, 1, (5, N)).astype(np.float32)
    x[0] = 0
    x[1, 3] = np.nan
    x[2] = 1e20
    weight, dy = mx.ones(N), mx.ones((5, N))
    y, dx, _ = (np.array(a) for a in norm_and_gradient(mx.array(x), weight, dy))
    assert (y[0] == 0).all() and np.isnan(y[1]).all() and (y[2] == 0).all() and np.isfinite(y[3:]).all()
    assert np.isfinite(dx[0]).all() and np.isnan(dx[1]).all() and (dx[2] == 0).all() and np.isfinite(dx[3:]).all()
    np.testing.assert_allclose(y, np.array(mx.fast.rms_norm(mx.array(x), weight, EPS, stream=mx.cpu)), rtol=1e-5)
    large = mx.full((1, 64), 6e4, mx.float16)
    y, dx, dw = norm_and_gradient(large, mx.ones(64, mx.float16), mx.ones((1, 64), mx.float16))
    assert (y == 1).all().item() and (dw == 1).all().item() and (mx.abs(dx) < 1e-6).all().item()


@pytest.mark.parametrize(
    "N, forward, gradient",
    [(8191, 512, 384), (8192, 512, 512), (12289, 384, 384), (16384, 512, 512), (20000, 384, 384)],
)
def test_threads_fit_in_the_registers(needs_harness, N, forward, gradient):
    """512 threads leave 104 registers for each, 384 leave 128: see the table of metal_kernels/README.md."""
    x, residual, weight, dh, dy = make((1,), N, DTYPES[0])
    with harness.use() as log:
        mx.eval(norm_and_gradient(x, weight, dy), add_norm_and_gradient(x, residual, weight, dh, dy))
    threads = [launch.threads // launch.groups for launch in log.launches]
    assert threads == [forward, gradient, forward, gradient]


@given(rows=st.integers(1, 5000), N=st.integers(1, 40_000) | st.integers(1, 40).map(lambda i: 1024 * i))
def test_template_of_any_size(rows, N):
    """EXACT threads hold whole rows, without further elements; only LONG rows don't fit."""
    x = mx.zeros((rows, N))  # not evaluated
    (forward, size), (_, gradient, gradient_size) = _forward_teams(x), _teams(x, 4, 32, 128)
    assert forward["LONG"] == (held(forward, size) < N) and not (forward["EXACT"] and forward["LONG"])
    for template, sizes, most in ((forward, size, 8), (gradient, gradient_size, 4)):
        threads = sizes["threadgroup"][0]
        assert threads % 32 == 0 and sizes["grid"][0] % threads == 0
        assert threads <= (512 if template["EXACT"] or template["CHUNKS"] < most else 384)
        assert template["EXACT"] == (N % held(template, sizes) == 0) or forward["LONG"]


def held(template, sizes):
    """The elements of a row that threads hold in registers at a time."""
    return 4 * template["CHUNKS"] * (sizes["threadgroup"][0] if template["WIDE"] else 32)


def test_gradient_checkpointing(metal):
    x, residual, weight, dh, dy = make((7,), 96, DTYPES[0])

    def total(x, residual, weight):
        h, y = add_rms_norm_metal(x, residual, weight, EPS)
        return (dh * h + dy * rms_norm_metal(y, weight, EPS)).sum()

    plain = mx.grad(total, (0, 1, 2))(x, residual, weight)
    again = mx.grad(mx.checkpoint(total), (0, 1, 2))(x, residual, weight)
    assert all(mx.array_equal(a, b) for a, b in zip(plain, again, strict=True))


def test_compiled(metal):
    if metal is not None:
        pytest.skip("the harness evaluates its inputs, which is impossible in a compiled function")
    arguments = make((7,), 96, DTYPES[0])
    for a, b in zip(mx.compile(add_norm_and_gradient)(*arguments), add_norm_and_gradient(*arguments), strict=True):
        assert mx.allclose(a, b, rtol=1e-6, atol=1e-6).item()


def test_order_of_threads_does_not_matter(needs_harness):
    for N in (100, 600, 8200):
        arguments = make((9,), N, DTYPES[0])
        results = []
        for seed in (0, 1):
            with harness.use(seed=seed):
                results.append(add_norm_and_gradient(*arguments))
        assert all(mx.array_equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("N, dtype", [(128, mx.float16), (1024, mx.float32)])
def test_memory_traffic_is_near_the_minimum(needs_harness, monkeypatch, N, dtype):
    """Within a tenth of reading each argument once and writing each result once.

    An eighth of the usual rows and teams: as many rows per team as with 2048 rows.
    """
    module = sys.modules[rms_norm_metal.__module__]
    monkeypatch.setattr(module, "_FORWARD_TEAMS", 16)
    monkeypatch.setattr(module, "_GRADIENT_TEAMS", 16)
    x, residual, weight, dh, dy = make((256,), N, (dtype, dtype))
    rows, weights = x.nbytes, weight.nbytes
    with harness.use() as log:
        mx.eval(norm_and_gradient(x, weight, dy), add_norm_and_gradient(x, residual, weight, dh, dy))
    moved = [launch.read + launch.written for launch in log.launches]
    least = [2 * rows + weights, 3 * rows + 2 * weights, 4 * rows + weights, 4 * rows + 2 * weights]
    ratios = dict(zip(["norm", "gradient", "add and norm", "its gradient"], np.divide(moved, least), strict=True))
    assert all(1 <= ratio <= 1.1 for ratio in ratios.values()), ratios
    # Separate kernels write and read the sum again, and the gradient before the residual's is added.
    assert moved[2] < 0.85 * (3 * rows + moved[0]) and moved[3] < 0.7 * (3 * rows + moved[1])
