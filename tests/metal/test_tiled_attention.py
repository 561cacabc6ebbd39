"""The training attention against float64 numpy: values, log-sum-exp and all gradients."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from mlxlm.kernels import flash_attention
from mlxlm.kernels.blockwise_attention import blockwise_attention
from mlxlm.kernels.flash_attention import attention_with_lse, tiled_attention
from mlxlm.kernels.metal import MetalKernel
from mlxlm.kernels.mlx_attention import mlx_attention
from tests import oracle
from tests.metal import harness
from tests.oracle import as64

# Largest error over the largest expected value, or over 1, the size of the inputs. Gradients start from the rounded
# output, and so are no better than it.
TOLERANCE = {mx.float32: 1e-5, mx.float16: 2e-3, mx.bfloat16: 1.6e-2}
# The log-sum-exp is float32 whatever the inputs are, and the oracle sees the same rounded inputs.
LSE_TOLERANCE = 2e-6

few = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def normal(seed, *shape, dtype=mx.float32):
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


def problem(B, H, kv_heads, T, S, D, dtype=mx.float32):
    """Queries, keys, values and the cotangents of output and log-sum-exp."""
    return (
        normal(0, B, H, T, D, dtype=dtype),
        normal(1, B, kv_heads, S, D, dtype=dtype),
        normal(2, B, kv_heads, S, D, dtype=dtype),
        normal(3, B, H, T, D, dtype=dtype),
        normal(4, B, H, T),
    )


def error(actual, expected):
    assert actual.shape == expected.shape
    actual = as64(actual)
    assert np.array_equal(np.isfinite(actual), np.isfinite(expected))
    finite = np.isfinite(expected)
    if not finite.any():
        return 0.0
    return np.abs(actual[finite] - expected[finite]).max() / max(np.abs(expected[finite]).max(), 1)


def lse_gradients(q, k, scale, lse_grad, window, segment_ids):
    """Gradients of sum(lse_grad * lse) by queries and keys: the probabilities times the other one."""
    dq = scale * lse_grad[..., None] * oracle.attention(q, k, k, scale, window, segment_ids=segment_ids)[0]
    dk = oracle.attention_grad(q, k, k, scale, scale * lse_grad[..., None] * q, window, segment_ids)[2]
    return dq, dk


def check(q, k, v, output_grad, lse_grad, scale, window=None, segment_ids=None):
    segments = () if segment_ids is None else (mx.array(segment_ids, mx.int32),)
    attend = attention_with_lse(scale, window)
    (output, lse), gradients = mx.vjp(lambda *qkv: attend(*qkv, *segments), [q, k, v], [output_grad, lse_grad])
    q64, k64, v64, do64, dlse64 = map(as64, (q, k, v, output_grad, lse_grad))
    expected, expected_lse = oracle.attention(q64, k64, v64, scale, window, segment_ids=segment_ids)
    dq, dk, dv = oracle.attention_grad(q64, k64, v64, scale, do64, window, segment_ids)
    more_dq, more_dk = lse_gradients(q64, k64, scale, dlse64, window, segment_ids)
    assert output.dtype == q.dtype and lse.dtype == mx.float32
    assert error(lse, expected_lse) < LSE_TOLERANCE
    errors = [
        error(actual, wanted)
        for actual, wanted in zip((output, *gradients), (expected, dq + more_dq, dk + more_dk, dv), strict=True)
    ]
    assert max(errors) < TOLERANCE[q.dtype], errors
    return errors


@given(data=st.data())
@few
def test_values_and_gradients_equal_float64(metal, data):
    draw = data.draw
    kv_heads, groups = draw(st.sampled_from([(1, 1), (2, 1), (1, 2), (2, 3), (1, 8)]))
    T = draw(st.integers(1, 70))
    S = max(1, T + draw(st.integers(-8, 60)))
    window = draw(st.none() | st.integers(1, 40))
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    D = {mx.float32: 8, mx.float16: 64, mx.bfloat16: 40}[dtype]
    B = draw(st.integers(1, 2)) if kv_heads * groups == 1 else 1
    check(*problem(B, kv_heads * groups, kv_heads, T, S, D, dtype), D**-0.5, window)


def texts(seed, B, T, count):
    """Segment ids: each row has up to `count` texts of any lengths."""
    rng = np.random.default_rng(seed)
    return np.sort(rng.integers(0, 3 * count, (B, count))[:, rng.integers(0, count, T)], axis=1)


@given(data=st.data())
@few
def test_segments_equal_float64(metal, data):
    draw = data.draw
    kv_heads, groups = draw(st.sampled_from([(1, 1), (2, 1), (1, 2)]))
    T, B = draw(st.integers(1, 100)), draw(st.integers(1, 2))
    window = draw(st.none() | st.integers(1, 40))
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    D = {mx.float32: 8, mx.float16: 64, mx.bfloat16: 40}[dtype]
    S = T + draw(st.sampled_from([0, 0, 30]))
    segment_ids = texts(draw(st.integers(0, 99)), B, S, draw(st.integers(1, 9)))
    arrays = problem(B, kv_heads * groups, kv_heads, T, S, D, dtype)
    check(*arrays, D**-0.5, window, segment_ids)


@pytest.mark.parametrize("window", [None, 20])
def test_segments_equal_mlx(metal, window):
    """Packed rows whose padding is a text of its own."""
    q, k, v, output_grad, _ = problem(2, 2, 1, 150, 150, 16)
    segment_ids = mx.array(np.array([[0] * 70 + [1] * 3 + [2] * 60 + [3] * 17, [0] * 149 + [1]]), mx.int32)
    options = {"window": window, "segment_ids": segment_ids}
    out, gradients = mx.vjp(lambda *x: tiled_attention(*x, 0.25, **options), [q, k, v], [output_grad])
    expected, wanted = mx.vjp(lambda *x: mlx_attention(*x, 0.25, **options), [q, k, v], [output_grad])
    for x, y in zip((*out, *gradients), (*expected, *wanted), strict=True):
        assert mx.abs(x - y).max() < 1e-5


def test_sinks_equal_mlx(metal):
    q, k, v, output_grad, _ = problem(2, 2, 1, 70, 70, 16)
    arrays = [q, k, v, mx.array([-1.0, 2.0])]
    (out, gradients), (expected, wanted) = (
        mx.vjp(lambda q, k, v, sinks, path=path: path(q, k, v, 0.25, sinks=sinks), arrays, [output_grad])
        for path in (tiled_attention, blockwise_attention)
    )
    for x, y in zip((*out, *gradients), (*expected, *wanted), strict=True):
        assert mx.abs(x - y).max() < 1e-5


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("D", [32, 64, 72, 128])
def test_head_dims(metal, D, dtype):
    """Up to 32, a SIMD group holds 16 rows; above 64, two SIMD groups share the work of a gradient."""
    check(*problem(1, 1, 1, 35, 41, D, dtype), D**-0.5)


def test_split_gradients(needs_harness):
    """Few keys and many queries: several threadgroups add to the gradients of a key."""
    with harness.use() as log:
        check(*problem(1, 8, 1, 90, 90, 16), 0.25, segment_ids=texts(0, 1, 90, 4))
    groups = {launch.kernel: launch.groups for launch in log.launches}
    assert groups["mlxlm_attention_grad_key_value"] == 2 * 6  # 8 heads of 6 staged tiles, 8 for each threadgroup


@pytest.mark.parametrize("T", [1, 8, 9, 33])
@pytest.mark.parametrize("window", [None, 1, 8, 9, 33])
def test_edges_of_tiles(metal, T, window):
    for more in (0, 1, 8, 31, 33):
        check(*problem(1, 1, 1, T, T + more, 8), 0.35, window)


def test_keys_that_no_query_sees_are_ignored(metal):
    q, k, v, output_grad, _ = problem(1, 1, 1, 40, 168, 8)
    unseen = mx.arange(168)[:, None] < 128 - 8 + 1  # the first row sits at 128 and sees eight keys
    k, v = (mx.where(unseen, mx.nan, x) for x in (k, v))
    output, gradients = mx.vjp(lambda *qkv: tiled_attention(*qkv, 0.2, window=8), [q, k, v], [output_grad])
    for x in (*output, *gradients):
        assert mx.isfinite(x).all()
    for x in gradients[1:]:
        assert (mx.where(unseen, x, 0) == 0).all()


@pytest.mark.parametrize("window, texts, times", [(16, 1, 2), (None, 1, 3), (None, 8, 1.5)])
def test_tiles_that_no_query_sees_are_not_read(needs_harness, window, texts, times):
    """64 rows with a window of 16 see 79 keys; 4 tiles of rows without a window see 2.5 on average; texts of 32 rows
    see only their own. Two threadgroups share the queries of a key."""
    q, k, v, output_grad, _ = problem(1, 1, 1, 256, 256, 8)
    options = {"window": window, "segment_ids": mx.arange(256)[None] * texts // 256}
    with harness.use() as log:
        mx.vjp(lambda *qkv: tiled_attention(*qkv, 0.2, **options), [q, k, v], [output_grad])
    assert len(log.launches) == 3
    for launch in log.launches:
        assert launch.loaded <= times * launch.unique_read


def test_rows_without_keys_are_zero(metal):
    T, S = 45, 9
    q, k, v, output_grad, lse_grad = problem(1, 2, 1, T, S, 8)
    check(q, k, v, output_grad, lse_grad, 0.3)
    output, lse = attention_with_lse(0.3, None)(q, k, v)
    assert (output[:, :, : T - S] == 0).all() and (lse[:, :, : T - S] == -mx.inf).all()
    (query_grad,) = mx.vjp(lambda q: tiled_attention(q, k, v, 0.3), [q], [output_grad])[1]
    assert (query_grad[:, :, : T - S] == 0).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_scores(metal, sign):
    """Scores of some 1e4 either way: float32 resolves them to 1e-3, and so the probabilities."""
    q, k, v, output_grad, lse_grad = problem(1, 1, 1, 40, 40, 8)
    q, k = mx.round(4 * mx.abs(q)), mx.round(4 * sign * mx.abs(k))  # whole, so that the products are exact
    scale = 128.0
    assert np.abs(as64(q) @ as64(k).swapaxes(-1, -2)).max() * scale > 1e4
    output, lse = attention_with_lse(scale, None)(q, k, v)
    expected, expected_lse = oracle.attention(*map(as64, (q, k, v)), scale)
    assert error(output, expected) < 2e-3 and error(lse, expected_lse) < 1e-6
    gradients = mx.vjp(lambda *qkv: tiled_attention(*qkv, scale), [q, k, v], [output_grad])[1]
    for actual, wanted in zip(
        gradients, oracle.attention_grad(*map(as64, (q, k, v)), scale, as64(output_grad)), strict=True
    ):
        assert error(actual, wanted) < 5e-3


def test_strided_arrays(metal):
    q, k, v, output_grad, lse_grad = problem(2, 2, 1, 20, 26, 8)
    straight = check(q, k, v, output_grad, lse_grad, 0.2)
    q = mx.contiguous(q.swapaxes(1, 2)).swapaxes(1, 2)  # a projection's heads
    k = mx.concatenate([k, k], axis=2)[:, :, :26]  # a cache's view
    v = mx.contiguous(v.swapaxes(2, 3)).swapaxes(2, 3)
    output_grad = mx.contiguous(output_grad.swapaxes(0, 2)).swapaxes(0, 2)
    lse_grad = mx.contiguous(lse_grad.swapaxes(0, 2)).swapaxes(0, 2)
    mx.eval(q, k, v, output_grad, lse_grad)
    assert check(q, k, v, output_grad, lse_grad, 0.2) == straight
    ones = mx.broadcast_to(mx.array(1.0), q.shape)
    check(q, k, v, ones, mx.broadcast_to(mx.array(0.5), lse_grad.shape), 0.2)


def test_gradient_and_checkpoint(metal):
    q, k, v, weight, _ = problem(1, 2, 1, 40, 40, 8)

    def loss(attend):
        return mx.grad(lambda *qkv: (weight * attend(*qkv)).sum(), argnums=(0, 1, 2))(q, k, v)

    def attend(q, k, v):
        return tiled_attention(q, k, v, 0.2)

    plain, again = loss(attend), loss(mx.checkpoint(attend))
    expected = oracle.attention_grad(*map(as64, (q, k, v)), 0.2, as64(weight))
    for one, other, wanted in zip(plain, again, expected, strict=True):
        assert error(one, wanted) < TOLERANCE[mx.float32]
        assert (one == other).all()


def test_order_of_threads_does_not_matter(needs_harness):
    q, k, v, output_grad, lse_grad = problem(1, 2, 1, 37, 70, 8)
    results = []
    for seed in range(2):
        with harness.use(seed=seed):
            outputs, gradients = mx.vjp(attention_with_lse(0.2, 40), [q, k, v], [output_grad, lse_grad])
            results.append([*outputs, *gradients])
    for other in results[1:]:
        assert all((a == b).all() for a, b in zip(results[0], other, strict=True))


@pytest.fixture
def traced(monkeypatch):
    """Launches are recorded and give lazy zeros: the wiring without a GPU, and without a computation."""
    launches = []

    def launch(kernel, inputs, template, grid, threadgroup, outputs):
        launches.append((kernel.name, outputs))
        return [mx.zeros(shape, dtype) for shape, dtype in outputs]

    monkeypatch.setattr(MetalKernel, "__call__", launch)
    return launches


def test_traces_under_compile(traced):
    def loss(q, k, v):
        return tiled_attention(q, k, v, 0.2, window=16).sum()

    step = mx.compile(mx.value_and_grad(mx.checkpoint(loss), argnums=(0, 1, 2)))
    q, k, v, _, _ = problem(1, 4, 2, 24, 40, 32, mx.bfloat16)
    for _ in range(2):
        value, gradients = step(q, k, v)
        assert value.item() == 0
        assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]
        assert all(g.dtype == mx.bfloat16 for g in gradients)
    assert {name for name, _ in traced} == {
        "attention_forward", "attention_grad_query", "attention_grad_key_value"
    }  # fmt: skip


def test_memory_is_linear_in_the_length(traced):
    T = 1 << 20
    q = mx.broadcast_to(mx.array(0.0, mx.bfloat16), (1, 2, T, 64))
    mx.grad(lambda q: tiled_attention(q, q, q, 0.125).sum())(q)
    bytes_written = sum(np.prod(shape) * dtype.size for _, outputs in traced for shape, dtype in outputs)
    assert bytes_written == 4 * q.size * 2 + 2 * q.size // 64 * 4  # output and three gradients, two statistics


@pytest.mark.parametrize(
    "T, D, dtype, window, text_length",
    [
        (128, 64, mx.float32, None, None),
        (256, 32, mx.bfloat16, 64, None),
        (256, 64, mx.bfloat16, None, 64),
        (192, 128, mx.bfloat16, None, None),
        (128, 128, mx.float32, 33, None),
    ],
)
def test_products_are_those_of_the_tiles_that_a_query_sees(needs_harness, T, D, dtype, window, text_length):
    """Two products per tile in the forward pass, three for the queries' gradient, four for keys and values."""
    q, k, v, output_grad, _ = problem(1, 2, 1, T, T, D, dtype)
    ids = None if text_length is None else (mx.arange(T, dtype=mx.int32) // text_length)[None]
    with harness.use() as log:
        mx.vjp(lambda *x: tiled_attention(*x, 0.2, window=window, segment_ids=ids), [q, k, v], [output_grad])
    expected = 0
    for count, name in ((2, "_FORWARD"), (3, "_GRAD_QUERY"), (4, "_GRAD_KEY_VALUE")):
        division = flash_attention._Division.of(getattr(flash_attention, name), D, dtype.size)
        rows, step = 8 * division.held, 8 if count > 2 and division.parts == 1 else division.staged
        for start in range(0, T, rows):
            first = max(start - (window or T) + 1, start // (text_length or T) * (text_length or T))
            expected += 2 * count * D * rows * -(-(start + rows - first) // step) * step
    assert 8**3 * sum(x.products for x in log.launches) == pytest.approx(expected, rel=0.02)
