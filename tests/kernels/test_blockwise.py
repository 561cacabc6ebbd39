"""Blockwise attention against float64 numpy and MLX, values and gradients, packed documents, and its memory."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from mlxlm.kernels import attention, use_kernels
from mlxlm.kernels import blockwise_attention as module
from mlxlm.kernels.attention import DECODE, TRAINING, attention_case
from mlxlm.kernels.blockwise_attention import blockwise_attention
from mlxlm.kernels.mlx_attention import mlx_attention
from tests import oracle


def random(shape, seed, scale=1.0, dtype=mx.float32):
    return mx.array(np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)).astype(dtype)


def arrays(B, K, G, T, S, D, scale=1.0, dtype=mx.float32, V=None):
    shapes = ((B, K * G, T, D), (B, K, S, D), (B, K, S, V or D))
    return [random(shape, seed, scale, dtype) for seed, shape in enumerate(shapes)]


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of one row or a few, so that short lengths have many of them."""
    monkeypatch.setattr(module, "_MIN_ROWS", 1)
    monkeypatch.setattr(module, "_BLOCK_BYTES", 2000)


@settings(max_examples=30)
@given(
    B=st.integers(1, 2), K=st.integers(1, 3), G=st.integers(1, 8), T=st.integers(1, 130), old=st.integers(0, 40),
    D=st.sampled_from([2, 8, 32]), window=st.none() | st.integers(1, 60), scale=st.sampled_from([0.01, 0.3, 30.0]),
    block=st.sampled_from([100, 5000, 1 << 20]), V=st.sampled_from([None, 5]),
)  # fmt: skip
def test_values_and_gradients_equal_float64(B, K, G, T, old, D, window, scale, block, V):
    q, k, v = arrays(B, K, G, T, T + old, D, V=V)
    g = random((*q.shape[:3], v.shape[3]), 3)
    plain = mlx_attention(q, k, v, scale, window=window)
    before = module._BLOCK_BYTES, module._MIN_ROWS
    module._BLOCK_BYTES, module._MIN_ROWS = block, 1
    try:
        (out,), grads = mx.vjp(lambda *x: blockwise_attention(*x, scale, window=window), [q, k, v], [g])
        mx.eval(out, grads)
    finally:
        module._BLOCK_BYTES, module._MIN_ROWS = before
    q, k, v, g = (oracle.as64(x) for x in (q, k, v, g))
    # Scores of 100 are themselves rounded by 1e-5 in float32.
    tolerance = {0.01: 2e-6, 0.3: 1e-5, 30.0: 5e-4}[scale]
    for found in (out, plain):
        wanted = oracle.attention(q, k, v, scale, window)[0]
        np.testing.assert_allclose(oracle.as64(found), wanted, atol=tolerance, rtol=0)
    for found, wanted in zip(grads, oracle.attention_grad(q, k, v, scale, g, window), strict=True):
        np.testing.assert_allclose(oracle.as64(found), wanted, atol=tolerance * max(1, np.abs(wanted).max()), rtol=0)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("alibi", [False, True])
def test_soft_cap_and_alibi(softcap, alibi, small_blocks):
    q, k, v = arrays(2, 2, 3, 20, 27, 8, 2.0)
    slopes = -(2.0 ** -mx.arange(1, 7)) if alibi else None
    out = blockwise_attention(q, k, v, 0.5, window=9, softcap=softcap, slopes=slopes)
    wanted, _ = oracle.attention(*map(oracle.as64, (q, k, v)), 0.5, 9, softcap, slopes)
    np.testing.assert_allclose(oracle.as64(out), wanted, atol=1e-5)


def test_gradient_of_the_soft_cap_by_finite_differences(small_blocks):
    q, k, v = arrays(1, 1, 2, 6, 6, 4)
    slopes = mx.array([-0.5, -0.25])
    weight = oracle.as64(random(q.shape, 5))

    def loss(q, k, v):
        return (oracle.attention(q, k, v, 0.7, 4, 2.0, slopes)[0] * weight).sum()

    def ours(q, k, v):
        out = blockwise_attention(q, k, v, 0.7, window=4, softcap=2.0, slopes=slopes)
        return (out * mx.array(weight.astype(np.float32))).sum()

    exact = [oracle.as64(x) for x in (q, k, v)]
    for i, found in enumerate(mx.grad(ours, (0, 1, 2))(q, k, v)):
        step = np.random.default_rng(i).normal(size=exact[i].shape)
        h = 1e-5
        up, down = ([x + (s * h * step if j == i else 0) for j, x in enumerate(exact)] for s in (1, -1))
        difference = (loss(*up) - loss(*down)) / (2 * h)
        assert (oracle.as64(found) * step).sum() == pytest.approx(difference, rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("transform", [mx.compile, mx.checkpoint, lambda f: mx.compile(mx.checkpoint(f))])
def test_under_compile_and_checkpoint(transform, small_blocks):
    q, k, v = arrays(1, 2, 2, 50, 50, 8)
    f = transform(lambda q, k, v: blockwise_attention(q, k, v, 0.3, window=20))

    def loss(q, k, v):
        return f(q, k, v).square().sum()

    def plain(q, k, v):
        distance = mx.arange(50)[:, None] - mx.arange(50)[None]
        mask = (distance >= 0) & (distance < 20)
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=0.3, mask=mask).square().sum()

    for found, wanted in zip(mx.grad(loss, (0, 1, 2))(q, k, v), mx.grad(plain, (0, 1, 2))(q, k, v), strict=True):
        np.testing.assert_allclose(np.array(found), np.array(wanted), atol=2e-5)


@pytest.mark.parametrize("dtype, tolerance", [(mx.float16, 4e-3), (mx.bfloat16, 3e-2)])
def test_half_precision(dtype, tolerance, small_blocks):
    q, k, v = arrays(1, 2, 2, 40, 40, 16, dtype=dtype)
    g = random(q.shape, 3, dtype=dtype)
    (out,), grads = mx.vjp(lambda *x: blockwise_attention(*x, 0.25), [q, k, v], [g])
    assert out.dtype == dtype and all(x.dtype == dtype for x in grads)
    q, k, v, g = (oracle.as64(x) for x in (q, k, v, g))
    np.testing.assert_allclose(oracle.as64(out), oracle.attention(q, k, v, 0.25)[0], atol=tolerance)
    for found, wanted in zip(grads, oracle.attention_grad(q, k, v, 0.25, g), strict=True):
        np.testing.assert_allclose(oracle.as64(found), wanted, atol=3 * tolerance)


@pytest.mark.parametrize("packed", [False, True])
def test_memory_of_a_gradient_is_linear_in_the_length(monkeypatch, packed):
    monkeypatch.setattr(module, "_BLOCK_BYTES", 1 << 16)

    def peak(T):
        q, k, v = arrays(1, 2, 1, T, T, 16)
        segment_ids = (mx.arange(T, dtype=mx.int32) // 100)[None] if packed else None
        mx.eval(q, k, v, segment_ids)
        mx.clear_cache()
        mx.reset_peak_memory()
        loss = mx.grad(lambda *x: blockwise_attention(*x, 0.25, segment_ids=segment_ids).square().sum(), (0, 1, 2))
        mx.eval(loss(q, k, v))
        return mx.get_peak_memory() - mx.get_active_memory()

    assert peak(1024) < 8 * peak(256)  # 4 times; 16 times with all probabilities in memory


BLOCKWISE, PLAIN = blockwise_attention, mlx_attention


def alone(x, start, stop):
    return oracle.as64(x)[:, :, start:stop]


def documents(lengths):
    """(start, stop) of each."""
    ends = np.cumsum(lengths)
    return list(zip(ends - lengths, ends, strict=True))


@settings(max_examples=20)
@given(
    rows=st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=6), min_size=1, max_size=2),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 3)]),
    window=st.none() | st.integers(1, 40),
    softcap=st.none() | st.just(3.0),
    alibi=st.booleans(),
    path=st.sampled_from([BLOCKWISE, PLAIN]),
)
def test_packed_documents_equal_separate_ones(rows, heads, window, softcap, alibi, path):
    """Forward and gradient, in float64 for each document, with windows, soft cap and ALiBi."""
    K, G = heads
    T = max(map(sum, rows))
    rows = [[*lengths, T - sum(lengths)] if sum(lengths) < T else lengths for lengths in rows]
    segment_ids = mx.array(np.stack([np.repeat(np.arange(len(r)), r) for r in rows])).astype(mx.int32)
    q, k, v = (random((len(rows), n, T, 8), i) for i, n in enumerate((K * G, K, K)))
    g = random(q.shape, 3)
    options = {"window": window}
    if path is BLOCKWISE:
        options |= {"softcap": softcap, "slopes": -(2.0 ** -mx.arange(1, K * G + 1)) if alibi else None}
    before = module._BLOCK_BYTES, module._MIN_ROWS
    module._BLOCK_BYTES, module._MIN_ROWS = 3000, 1
    try:
        (out,), grads = mx.vjp(lambda *x: path(*x, 0.4, segment_ids=segment_ids, **options), [q, k, v], [g])
        mx.eval(out, grads)
    finally:
        module._BLOCK_BYTES, module._MIN_ROWS = before
    for b, lengths in enumerate(rows):
        for start, stop in documents(lengths):
            parts = [alone(x[b : b + 1], start, stop) for x in (q, k, v)]
            wanted, _ = oracle.attention(*parts, 0.4, *options.values())
            np.testing.assert_allclose(alone(out[b : b + 1], start, stop), wanted, atol=2e-5)
            if options.get("softcap") is None and options.get("slopes") is None:
                gradient = oracle.attention_grad(*parts, 0.4, alone(g[b : b + 1], start, stop), window)
                for found, exact in zip(grads, gradient, strict=True):
                    np.testing.assert_allclose(alone(found[b : b + 1], start, stop), exact, atol=5e-5)


def test_gradient_with_soft_cap_and_alibi_equals_separate_documents(monkeypatch):
    monkeypatch.setattr(module, "_MIN_ROWS", 1)
    monkeypatch.setattr(module, "_BLOCK_BYTES", 3000)
    options = {"window": 9, "softcap": 2.0, "slopes": mx.array([-0.5, -0.25])}
    q, k, v, g = (random((1, n, 40, 8), n + i) for i, n in enumerate((2, 1, 1, 2)))
    lengths = np.array([7, 20, 1, 12])
    segment_ids = mx.array(np.repeat(np.arange(4), lengths)[None]).astype(mx.int32)
    _, together = mx.vjp(lambda *x: blockwise_attention(*x, 0.6, segment_ids=segment_ids, **options), [q, k, v], [g])
    for start, stop in documents(lengths):
        parts = [x[:, :, start:stop] for x in (q, k, v, g)]
        _, single = mx.vjp(lambda *x: blockwise_attention(*x, 0.6, **options), parts[:3], parts[3:])
        for found, wanted in zip(together, single, strict=True):
            np.testing.assert_allclose(np.array(found)[:, :, start:stop], np.array(wanted), atol=1e-5)


@pytest.mark.parametrize("mode", ["auto", "mlx", "blockwise"])
@pytest.mark.parametrize("training", [True, False])
def test_every_mode(mode, training):
    """Of all positions, and of the last ones."""
    q, k, v = (random((2, n, 12, 8), n) for n in (4, 2, 2))
    segment_ids = mx.array([[0] * 5 + [1] * 7, [0] * 12]).astype(mx.int32)
    with use_kernels(mode):
        out = attention(q, k, v, 0.3, segment_ids=segment_ids, training=training)
        for T in (9, 1):
            last = attention(q[:, :, -T:], k, v, 0.3, segment_ids=segment_ids, window=11, training=training)
            np.testing.assert_allclose(np.array(last)[0], np.array(out)[0, :, -T:], atol=1e-5)
    for b, lengths in enumerate(([5, 7], [12])):
        for start, stop in documents(lengths):
            wanted, _ = oracle.attention(*(alone(x[b : b + 1], start, stop) for x in (q, k, v)), 0.3)
            np.testing.assert_allclose(alone(out[b : b + 1], start, stop), wanted, atol=1e-5)


def test_which_paths_support_segment_ids():
    case = attention_case(TRAINING, "float32", 64, 4, 2, 512, 512, ("segment_ids",))
    assert [TRAINING.unsupported_reason(path, case) for path in TRAINING.paths] == [None, None, None]
    case = attention_case(DECODE, "float32", 64, 4, 2, 8, 8, ("segment_ids",))
    assert DECODE.unsupported_reason("metal", case) == "it doesn't support segment_ids"
