"""Attention sinks on every path, against float64 numpy and gradients of the definition."""

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.kernels import QuantizedKV, attention, dispatch, masked_attention, use_kernels
from tests import oracle

SINKS = mx.array([-2.0, 0.0, 1.5, 4.0, 90.0, -90.0])  # of six heads: the last two outweigh everything and nothing


def arrays(T, S, D=32):
    shapes = ((2, 6, T, D), (2, 2, S, D), (2, 2, S, D))
    return [mx.random.normal(shape, key=mx.random.key(i)) for i, shape in enumerate(shapes)]


def reference(q, k, v, scale, **options):
    return oracle.attention(*map(oracle.as64, (q, k, v)), scale, sinks=SINKS, **options)[0]


@pytest.mark.parametrize("path", ["mlx", "blockwise", "auto"])
@pytest.mark.parametrize(("T", "S"), [(1, 20), (1, 3000), (5, 5), (70, 90)])
@pytest.mark.parametrize("window", [None, 7])
def test_values_equal_float64(path, T, S, window):
    q, k, v = arrays(T, S)
    with use_kernels(path):
        found = attention(q, k, v, 0.3, window=window, sinks=SINKS)
    np.testing.assert_allclose(np.array(found), reference(q, k, v, 0.3, window=window), atol=2e-5)


@pytest.mark.parametrize("T", [1, 4])
@pytest.mark.parametrize("bits", [(8, 8), (4, None)], ids=str)
def test_quantized_keys_and_values(T, bits, monkeypatch):
    monkeypatch.setattr(dispatch, "metal_available", lambda: False)
    q, k, v = arrays(T, 30)
    quantized = [x if b is None else QuantizedKV.of(x, b, 32) for x, b in zip((k, v), bits, strict=True)]
    plain = [x if b is None else x.dequantized() for x, b in zip(quantized, bits, strict=True)]
    found = attention(q, *quantized, 0.3, window=9, sinks=SINKS)
    np.testing.assert_allclose(np.array(found), reference(q, *plain, 0.3, window=9), atol=2e-5)


class LastKeys:
    """In a decoding step: both rows see all of the keys, or those of a window."""

    def __init__(self, S):
        self.ranges, self.distances = mx.array([[0, S]] * 2, mx.int32), mx.arange(S) - S + 1

    def mask(self, window, heads=1):
        visible = self.distances > -(window or 1 << 30)
        return mx.broadcast_to(visible, (2, heads, 1, visible.size))


@pytest.mark.parametrize("S", [20, 3000])
@pytest.mark.parametrize("options", [{}, {"window": 7}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("quantized", [False, True])
def test_a_decoding_step(S, options, quantized, monkeypatch):
    monkeypatch.setattr(dispatch, "metal_available", lambda: False)
    q, k, v = arrays(1, S)
    k, v = (mx.repeat(x, 3, axis=1) for x in (k, v))  # with fewer key heads, a CPU dequantizes them
    if quantized:
        k, v = (QuantizedKV.of(x, 8, 32) for x in (k, v))
    found = masked_attention(q, k, v, 0.3, LastKeys(S), sinks=SINKS, **options)
    plain = (x.dequantized() if quantized else x for x in (k, v))
    np.testing.assert_allclose(np.array(found), reference(q, *plain, 0.3, **options), atol=2e-5)


@pytest.mark.parametrize("options", [{}, {"window": 5}, {"segment_ids": True}, {"softcap": 2.0}], ids=str)
def test_gradients_are_those_of_the_definition(options):
    """Of queries, keys, values and sinks, in training of packed texts, too."""
    q, k, v = arrays(40, 40, 8)
    ids = np.array([[0] * 13 + [1] * 27, [0] * 40])
    ids = ids if options.get("segment_ids") else np.zeros_like(ids)
    distance = np.arange(40)[:, None] - np.arange(40)
    seen = (distance >= 0) & (distance < options.get("window", 40))
    mask = mx.array(seen & (ids[:, None, :, None] == ids[:, None, None, :]))
    given = {**options, **({"segment_ids": mx.array(ids, mx.int32)} if "segment_ids" in options else {})}
    cotangent = mx.random.normal(q.shape, key=mx.random.key(9))

    def definition(q, k, v, sinks):
        scores = 0.4 * q @ mx.repeat(k, 3, axis=1).swapaxes(-1, -2)
        if "softcap" in options:
            scores = 2.0 * mx.tanh(scores / 2.0)
        column = mx.broadcast_to(sinks[:, None, None], (*scores.shape[:3], 1))
        probs = mx.softmax(mx.concatenate([mx.where(mask, scores, -mx.inf), column], axis=-1), axis=-1)
        return probs[..., :-1] @ mx.repeat(v, 3, axis=1)

    def ours(q, k, v, sinks):
        return attention(q, k, v, 0.4, **given, sinks=sinks, training=True)

    (wanted,), expected = mx.vjp(definition, [q, k, v, SINKS], [cotangent])
    (found,), gradients = mx.vjp(ours, [q, k, v, SINKS], [cotangent])
    np.testing.assert_allclose(np.array(found), np.array(wanted), atol=1e-5)
    for own, other in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(np.array(own), np.array(other), atol=2e-5)
