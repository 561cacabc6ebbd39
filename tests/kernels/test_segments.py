"""Packed documents: every path against each document computed separately, values and gradients."""

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

BLOCKWISE, PLAIN = blockwise_attention, mlx_attention


def random(shape, seed):
    return mx.array(np.random.default_rng(seed).normal(0, 1, shape).astype(np.float32))


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
    q, k, v = (random((2, n, 12, 8), n) for n in (4, 2, 2))
    segment_ids = mx.array([[0] * 5 + [1] * 7, [0] * 12]).astype(mx.int32)
    with use_kernels(mode):
        out = attention(q, k, v, 0.3, segment_ids=segment_ids, training=training)
    for b, lengths in enumerate(([5, 7], [12])):
        for start, stop in documents(lengths):
            wanted, _ = oracle.attention(*(alone(x[b : b + 1], start, stop) for x in (q, k, v)), 0.3)
            np.testing.assert_allclose(alone(out[b : b + 1], start, stop), wanted, atol=1e-5)


def test_which_paths_support_segment_ids():
    case = attention_case(TRAINING, "float32", 64, 4, 2, 512, 512, ("segment_ids",))
    assert [TRAINING.unsupported_reason(path, case) for path in TRAINING.paths] == [None, None, None]
    case = attention_case(DECODE, "float32", 64, 4, 2, 8, 8, ("segment_ids",))
    assert DECODE.unsupported_reason("metal", case) == "it doesn't support segment_ids"


@pytest.mark.parametrize("segment_ids", [mx.zeros((1, 5), mx.int32), mx.zeros((2, 6), mx.int32), mx.zeros((1, 6))])
def test_invalid_segment_ids(segment_ids):
    q = random((1, 1, 6, 8), 0)
    with pytest.raises(ValueError, match=r"segment_ids has .*, not \(1, 6\) and int32"):
        attention(q, q, q, 1.0, segment_ids=segment_ids)
    k = random((1, 1, 9, 8), 0)
    with pytest.raises(ValueError, match="as many queries"):
        attention(q, k, k, 1.0, segment_ids=mx.zeros((1, 9), mx.int32))
