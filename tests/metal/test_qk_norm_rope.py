"""The kernel of the norms of queries and keys with RoPE against float64 numpy: values, launches and memory traffic."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from mlxlm.kernels.qk_norm_rope import QK_NORM_ROPE, RoPE
from tests import oracle
from tests.metal import harness

# Largest error beside the sum of the sizes of the terms: half a unit in the last place, and some of float32.
TOLERANCE = {mx.float32: 2e-6, mx.float16: 2**-11 * 1.02, mx.bfloat16: 2**-8 * 1.02}
ANGLE_TOLERANCE = 4e-7  # of an angle: a frequency is a power of two in float32
TINY = 2**-24  # float16 below its normal numbers
EPS = 1e-6

some = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def make(rows, heads, kv_heads, D, dims, dtype, norm=True, waves=False, seed=0, scale=1.0):
    """The arguments of a call."""
    rng = np.random.default_rng(seed)

    def normal(mean, deviation, *shape):
        return mx.array(rng.normal(mean, deviation, shape).astype(np.float32)).astype(dtype)

    x = normal(0, scale, rows, heads + kv_heads + 1, 1, D)
    norms = (normal(1, 0.3, D), normal(2, 0.3, D)) if norm else None
    wavelengths = mx.array(np.exp(rng.uniform(0, 9, dims // 2)).astype(np.float32)) if waves else None
    rope = RoPE(dims, None if waves else 10_000.0, wavelengths) if dims else None
    positions = mx.array(rng.integers(0, 5000, rows), mx.int32)
    return x, heads, kv_heads, norms, EPS, rope, positions


def check(x, heads, kv_heads, norms, eps, rope, positions):
    queries, keys = QK_NORM_ROPE.paths["metal"](x, heads, kv_heads, norms, eps, rope, positions)
    theta = np.zeros((len(x), 1, 1, 0))
    if rope is not None:  # as in MLX, the angle is a product of float32
        i = np.arange(rope.dims // 2, dtype=np.float32)
        frequencies = np.float32(rope.base or 1) ** (-2 * i / rope.dims)
        if rope.wavelengths is not None:
            frequencies = 1 / np.array(rope.wavelengths)
        theta = (np.array(positions, np.float32)[:, None] * frequencies.astype(np.float32))[:, None, None].astype(float)
    parts = (queries, oracle.as64(x[:, :heads])), (keys, oracle.as64(x[:, heads : heads + kv_heads]))
    for (found, wanted), weight in zip(parts, norms or (None, None), strict=True):
        assert found.dtype == mx.result_type(x, *(norms or ())) and found.shape == wanted.shape
        wanted = wanted if weight is None else oracle.rms_norm(wanted, oracle.as64(weight), eps)
        first, second, others = np.split(np.abs(wanted), [theta.shape[-1], 2 * theta.shape[-1]], axis=-1)
        turned = (first + second) * (TOLERANCE[found.dtype] + ANGLE_TOLERANCE * theta)
        tolerance = np.concatenate([turned, turned, others * TOLERANCE[found.dtype]], axis=-1)
        tolerance += TINY if found.dtype == mx.float16 else 1e-30
        error = np.abs(oracle.as64(found) - oracle.rope(wanted, theta))
        assert (error <= tolerance).all(), f"{(error / tolerance).max()} x the tolerance"


# Each combination of dtype, sizes and flags is a kernel to compile.
kinds = st.sampled_from([
    (32, 32, mx.float32), (64, 64, mx.bfloat16), (80, 20, mx.float16), (80, 80, mx.float32), (96, 0, mx.bfloat16),
    (128, 128, mx.bfloat16), (128, 64, mx.float16), (128, 126, mx.float32), (256, 256, mx.float16),
    (256, 64, mx.float32),
])  # fmt: skip


@some
@given(
    kind=kinds,
    heads=st.sampled_from([(1, 1), (6, 2), (5, 5), (3, 0)]),
    rows=st.integers(1, 9),
    norm=st.booleans(),
    waves=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    seed=st.integers(0, 99),
)
def test_equals_float64(metal, kind, heads, rows, norm, waves, scale, seed):
    D, dims, dtype = kind
    check(*make(rows, *heads, D, dims, dtype, norm or not dims, waves and dims > 0, seed, scale))


def test_any_strides(metal):
    x, *others = make(3, 4, 2, 64, 64, mx.float32)
    rows = mx.stack([x, 0 * x], axis=1).flatten(0, 1)[::2]
    heads_last = mx.contiguous(x.transpose(0, 3, 2, 1)).transpose(0, 3, 2, 1)
    for strided in (rows, heads_last):
        assert mx.array_equal(strided, x)
        check(strided, *others)


@pytest.mark.parametrize("dtypes", [(mx.bfloat16, mx.float32), (mx.float32, mx.float16)])
def test_norms_of_another_dtype(metal, dtypes):
    x, heads, kv_heads, norms, *others = make(2, 4, 2, 64, 32, dtypes[0])
    check(x, heads, kv_heads, tuple(weight.astype(dtypes[1]) for weight in norms), *others)


def test_extremes(metal):
    """A head of zeros stays 0, NaN stays in its head, and large float16 values don't overflow."""
    x, heads, kv_heads, norms, *others = make(2, 3, 1, 64, 32, mx.float16)
    values = np.array(x)
    values[0, 0], values[0, 1, 0, 40], values[1, 3] = 0, np.nan, 6e4
    queries, keys = QK_NORM_ROPE.paths["metal"](mx.array(values), heads, kv_heads, norms, *others)
    queries, keys = np.array(queries), np.array(keys)
    assert (queries[0, 0] == 0).all() and np.isnan(queries[0, 1]).all()
    assert np.isfinite(queries[0, 2]).all() and np.isfinite(queries[1]).all() and np.isfinite(keys).all()
    check(mx.array(np.nan_to_num(values)), heads, kv_heads, norms, *others)


def test_one_launch_reads_each_value_once(needs_harness):
    x, heads, kv_heads, norms, *others = make(4, 8, 2, 128, 128, mx.bfloat16)
    with harness.use() as log:
        queries, keys = QK_NORM_ROPE.paths["metal"](x, heads, kv_heads, norms, *others)
        mx.eval(queries, keys)
    (launch,) = log.launches
    weights = 4 * 10 * norms[0].nbytes  # each head reads one
    assert launch.written == queries.nbytes + keys.nbytes
    assert launch.read - launch.written - weights <= 4 * 10 * 64 * 4 + 64  # and positions


def test_order_of_threads_does_not_matter(needs_harness):
    results = []
    for seed in (0, 1):
        with harness.use(seed=seed):
            results.append(QK_NORM_ROPE.paths["metal"](*make(2, 4, 2, 80, 20, mx.float32)))
    assert all(mx.array_equal(a, b) for a, b in zip(*results, strict=True))


def test_compiled(metal):
    if metal is not None:
        pytest.skip("the harness evaluates its inputs, which is impossible in a compiled function")
    x, *middle, positions = make(3, 4, 2, 64, 64, mx.float32)

    def call(x, positions):
        return QK_NORM_ROPE.paths["metal"](x, *middle, positions)

    for a, b in zip(mx.compile(call)(x, positions), call(x, positions), strict=True):
        assert mx.array_equal(a, b)
