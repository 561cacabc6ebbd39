"""The CPU kernels against float64 numpy and against MLX's own operations, values and gradients."""

import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import ON_CPU, mx, nn
from mlxlm.kernels import (
    attention,
    clamped_swiglu,
    cross_entropy,
    gelu,
    gelu_tanh,
    log_softmax,
    swiglu,
    use_kernels,
    with_fused_gradients,
)
from mlxlm.kernels.eval_points import eval_at_points, eval_point, eval_points
from mlxlm.kernels.exp import exp_nonpositive
from tests import oracle
from tests.graphs import operations


def random(shape, seed=0, scale=1.0):
    return mx.array(np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32))


def close(found, expected, tolerance):
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=tolerance, atol=tolerance)


def test_exp_nonpositive_over_its_whole_range():
    x = np.concatenate([-np.geomspace(1e-10, 87, 200_001), [0.0]]).astype(np.float32)
    found = np.array(exp_nonpositive(mx.array(x)), dtype=np.float64)
    assert np.abs(found / np.exp(x.astype(np.float64)) - 1).max() < (4e-7 if ON_CPU else 4e-6)  # that of `mx.exp`
    extremes = np.array(exp_nonpositive(mx.array([-np.inf, -1e30, -100.0, np.nan, 0.0])))
    assert (extremes[:3] < 2e-38).all() and (extremes[:3] >= 0).all()
    assert np.isnan(extremes[3]) and extremes[4] == 1


def test_swiglu_value_and_gradient():
    gate, up = random((3, 50), 1, 4.0), random((3, 50), 2)

    def total(f):
        return lambda g, u: (f(g, u) * random((3, 50), 3)).sum()

    def plain(g, u):
        return nn.silu(g) * u

    close(swiglu(gate, up), plain(gate, up), 1e-6)
    for found, expected in zip(
        mx.grad(total(swiglu), (0, 1))(gate, up), mx.grad(total(plain), (0, 1))(gate, up), strict=True
    ):
        close(found, expected, 2e-6)
    far = mx.array([[-1e4, -200.0, 0.0, 200.0, 1e4]])
    close(swiglu(far, mx.ones_like(far)), [[0, 0, 0, 200, 1e4]], 1e-6)


@pytest.mark.parametrize("count", [50, 900])
def test_clamped_swiglu_value_and_gradient(count):
    gate, up, weight = (random((3, count), seed, 2.0) for seed in (1, 2, 3))
    ours = with_fused_gradients(clamped_swiglu(1.702, 1.5))

    def plain(gate, up):
        gate = mx.where(gate > 1.5, 1.5, gate)
        return gate * mx.sigmoid(1.702 * gate) * (mx.maximum(mx.minimum(up, 1.5), -1.5) + 1)

    close(ours(gate, up), plain(gate, up), 2e-6)
    gradients = [mx.grad(lambda g, u, f=f: (f(g, u) * weight).sum(), (0, 1))(gate, up) for f in (ours, plain)]
    for found, expected in zip(*gradients, strict=True):
        close(found, expected, 5e-6)


@pytest.mark.parametrize("ours, plain", [(gelu, nn.gelu), (gelu_tanh, nn.gelu_approx)])
def test_gelu_value_and_gradient(ours, plain):
    x = mx.linspace(-12, 12, 10_001)
    assert mx.abs(ours(x) - plain(x)).max().item() < 2e-6
    weight = random(x.shape, 1)
    found, expected = (mx.grad(lambda x, f=f: (f(x) * weight).sum())(x) for f in (ours, plain))
    assert mx.abs(found - expected).max().item() < 1e-5
    close(ours(mx.array([-1e4, 0.0, 1e4])), [0, 0, 1e4], 1e-6)
    assert ours(x.astype(mx.float16)).dtype == mx.float16


def test_gelu_equals_float64():
    x = np.linspace(-12, 12, 10_001).astype(np.float32)
    exact = [0.5 * v * math.erfc(-v / math.sqrt(2)) for v in x.astype(np.float64)]
    np.testing.assert_allclose(np.array(gelu(mx.array(x))), exact, atol=1e-6)


def test_cross_entropy_value_and_gradient():
    logits, targets = random((4, 7, 60), 1, 3.0), mx.array(np.random.default_rng(0).integers(0, 60, (4, 7)))
    weight = random((4, 7), 2)
    plain = nn.losses.cross_entropy
    close(cross_entropy(logits, targets), plain(logits, targets), 1e-5)
    found = mx.grad(lambda x: (cross_entropy(x, targets) * weight).sum())(logits)
    close(found, mx.grad(lambda x: (plain(x, targets) * weight).sum())(logits), 1e-6)
    huge = mx.array([[1e5, 0.0, -1e5]])
    close(cross_entropy(huge, mx.array([0])), [0.0], 1e-6)
    close(cross_entropy(huge, mx.array([2])), [2e5], 1e-6)


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_cross_entropy_equals_float64(dtype, on_cpu, monkeypatch):
    """On a CPU and a GPU, also for large close logits and logits of -inf."""
    monkeypatch.setattr(sys.modules["mlxlm.kernels.cross_entropy"], "ON_CPU", on_cpu)
    rows = [[30_000, 29_999.5, 29_000], [-30_000, -30_016, -30_008], [1, -np.inf, 0], [0, 0, 0], [-np.inf, 5, -np.inf]]
    logits, targets = mx.array(rows).astype(getattr(mx, dtype)), np.array([1, 2, 0, 2, 1])
    x = np.array(logits.astype(mx.float32), np.float64)
    shifted = x - x.max(-1, keepdims=True)
    exact = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    wanted = -exact[np.arange(5), targets]
    np.testing.assert_allclose(np.array(cross_entropy(logits, mx.array(targets))), wanted, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(np.array(log_softmax(logits)), exact, rtol=1e-6, atol=1e-6)
    gradient = mx.grad(lambda x: cross_entropy(x, mx.array(targets)).sum())(logits.astype(mx.float32))
    np.testing.assert_allclose(np.array(gradient), np.exp(exact) - np.eye(3)[targets], atol=1e-6)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_loss_of_an_impossible_target_is_infinite(on_cpu, monkeypatch):
    monkeypatch.setattr(sys.modules["mlxlm.kernels.cross_entropy"], "ON_CPU", on_cpu)
    assert cross_entropy(mx.array([[1.0, -mx.inf]]), mx.array([1])).item() == math.inf


@settings(max_examples=25)
@given(
    batch=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    new=st.integers(1, 150),
    old=st.integers(0, 40),
    dim=st.sampled_from([2, 8, 32]),
    scale=st.sampled_from([0.01, 0.2, 5.0]),
)
def test_attention_equals_float64(batch, kv_heads, groups, new, old, dim, scale):
    q = random((batch, kv_heads * groups, new, dim), 1)
    k, v = random((batch, kv_heads, old + new, dim), 2), random((batch, kv_heads, old + new, dim), 3)
    # With a scale of 5 the scores reach 100, whose own float32 rounding moves the probabilities by 1e-5.
    wanted, _ = oracle.attention(*map(oracle.as64, (q, k, v)), scale)
    close(attention(q, k, v, scale), wanted, 1e-5 if scale < 1 else 1e-4)


@pytest.mark.skipif(not ON_CPU, reason="compares the CPU path with MLX's own on the CPU")
def test_half_precision_keeps_its_dtype():
    q = random((1, 2, 4, 8)).astype(mx.float16)
    assert attention(q, q, q, 0.3).dtype == mx.float16
    assert swiglu(q, q).dtype == mx.float16


@pytest.mark.parametrize("window", [1, 5, 30, 100])
@pytest.mark.parametrize("new, old", [(1, 40), (6, 40), (70, 0), (70, 9)])
@pytest.mark.parametrize("dtype, tolerance", [(mx.float32, 2e-6), (mx.float16, 2e-3)])
def test_window_on_every_path_without_metal(window, new, old, dtype, tolerance):
    q = random((2, 4, new, 16), 1).astype(dtype)
    k, v = (random((2, 2, old + new, 16), seed).astype(dtype) for seed in (2, 3))
    wanted, _ = oracle.attention(*map(oracle.as64, (q, k, v)), 0.25, window)
    for path in ("mlx", "blockwise"):
        for training in (True, False):
            with use_kernels(path):
                found = attention(q, k, v, 0.25, window=window, training=training)
            np.testing.assert_allclose(oracle.as64(found), wanted, atol=tolerance)


def test_points_are_collected_in_order():
    outside = eval_point(mx.zeros((1,)))
    with eval_points() as points:
        first = eval_point(mx.ones((2,)) + 1)
        with eval_points() as inner:
            apart = eval_point(first * 3)
        last = eval_point(first * 2)
    assert [x is y for x, y in zip(points, (first, last), strict=True)] == [True, True]
    assert len(inner) == 1 and inner[0] is apart
    assert outside.item() == 0


def test_values_are_unchanged_and_the_list_is_emptied():
    def chain(x):
        for i in range(12):
            x = eval_point(mx.sin(x) + i)
        return x

    x = mx.linspace(0, 1, 1000)
    with eval_points() as points:
        y = chain(x)
    assert len(points) == 12
    eval_at_points(points)
    assert points == []
    np.testing.assert_array_equal(np.array(y), np.array(chain(x)))
    eval_at_points([])


def test_evaluated_points_are_released():
    """A few of a chain of 40 arrays of 4 MB are in memory at a time."""
    x = mx.zeros((1 << 20,))
    mx.eval(x)
    with eval_points() as points:
        for _ in range(40):
            x = eval_point(x + 1)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    eval_at_points(points)
    assert x[0].item() == 40
    assert mx.get_peak_memory() - before < 6 * (4 << 20)


not_on_cpu = pytest.mark.skipif(ON_CPU, reason="on a CPU, these functions have gradients of their own")
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


def clamped64(gate, up):
    inside, below = (np.abs(up) < 2.0), gate < 2.0
    gate, up = np.minimum(gate, 2.0), np.clip(up, -2.0, 2.0)
    s = 1 / (1 + np.exp(-1.702 * gate))
    return gate * s * (up + 1), [(up + 1) * (s + 1.702 * gate * s * (1 - s)) * below, gate * s * inside]


FUSED = [(swiglu, swiglu64, 2), (gelu, gelu64, 1), (gelu_tanh, gelu_tanh64, 1)]
CLAMPED = (clamped_swiglu(1.702, 2.0), clamped64, 2)  # MLX fuses no more than 11 operations in a row: two more kernels


def normals(count, dtype):
    return [(3 * mx.random.normal((4096,), key=mx.random.key(i))).astype(dtype) for i in range(count)]


@not_on_cpu
@pytest.mark.parametrize("dtype, tolerance", [(mx.bfloat16, 2**-7), (mx.float16, 2**-10)])
@pytest.mark.parametrize("function, exact, count", [*FUSED, CLAMPED])
def test_values_and_gradients(function, exact, count, dtype, tolerance):
    *args, cotangent = normals(count + 1, dtype)
    value, derivatives = exact(*map(oracle.as64, args))
    wanted = [value, *(oracle.as64(cotangent) * derivative for derivative in derivatives)]
    outputs, gradients = mx.vjp(with_fused_gradients(function), args, [cotangent])
    for found, expected in zip(outputs + gradients, wanted, strict=True):
        assert found.dtype == dtype
        assert np.abs(oracle.as64(found) - expected).max() <= tolerance * np.abs(expected).max()


@not_on_cpu
@pytest.mark.parametrize("function, exact, count", FUSED)
def test_a_training_step_takes_one_kernel_for_the_value_and_for_each_gradient(function, exact, count):
    def value_and_gradients(args, cotangent):
        outputs, gradients = mx.vjp(with_fused_gradients(function), args, [cotangent])
        return outputs + gradients

    *args, cotangent = normals(count + 1, mx.bfloat16)
    mx.eval(args, cotangent)
    results = mx.compile(value_and_gradients)(args, cotangent)
    launched = [name for name in operations(results) if name not in ("CustomTransforms", "Depends")]
    assert len(launched) == 1 + count and all(name.startswith("Compiled") for name in launched)
