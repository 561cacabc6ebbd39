"""The chunked loss against PyTorch, MLX's gradient of all logits, finite differences, and its memory."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from mlxlm.kernels import cross_entropy, linear_cross_entropy


def make(n: int, h: int, v: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    hidden, weight = rng.normal(size=(n, h)), rng.normal(size=(v, h))
    weights = rng.choice([0.0, 0.5, 1.0, 2.0], size=n)
    return hidden.astype(np.float32), weight.astype(np.float32), rng.integers(0, v, n), weights.astype(np.float32)


def exact(hidden, weight, targets, weights, softcap):
    """Loss and gradients in float64."""
    hidden, weight = hidden.astype(np.float64), weight.astype(np.float64)
    logits = hidden @ weight.T
    capped = logits if softcap is None else softcap * np.tanh(logits / softcap)
    e = np.exp(capped - capped.max(-1, keepdims=True))
    probs = e / e.sum(-1, keepdims=True)
    rows = np.arange(len(targets))
    loss = -(np.log(probs[rows, targets]) * weights).sum()
    probs[rows, targets] -= 1
    slopes = probs * weights[:, None] * (1 if softcap is None else 1 - (capped / softcap) ** 2)
    return loss, slopes @ weight, slopes.T @ hidden


def differentiated(hidden, weight, targets, weights, **options):
    def loss(hidden, weight):
        return linear_cross_entropy(hidden, weight, mx.array(targets), mx.array(weights), **options)

    found, gradients = mx.value_and_grad(loss, (0, 1))(mx.array(hidden), mx.array(weight))
    return found.item(), *map(np.array, gradients)


@settings(max_examples=25)
@given(
    n=st.integers(1, 40), h=st.integers(1, 9), v=st.integers(1, 33), chunk=st.integers(1, 50),
    softcap=st.sampled_from([None, 3.0]), kind=st.sampled_from(["sum", "training", "none"]), compiled=st.booleans(),
)  # fmt: skip
def test_exact_for_all_shapes(n, h, v, chunk, softcap, kind, compiled):
    arrays = make(n, h, v)
    wanted = exact(*arrays, softcap)

    def run(*arrays):
        def loss(hidden, weight):
            options = {"softcap": softcap, "chunk": chunk}
            if kind == "none":
                return (linear_cross_entropy(hidden, weight, arrays[2], reduction="none", **options) * arrays[3]).sum()
            return linear_cross_entropy(hidden, weight, *arrays[2:], training=kind == "training", **options)

        return mx.value_and_grad(loss, (0, 1))(*arrays[:2])

    loss, gradients = (mx.compile(run) if compiled else run)(*map(mx.array, arrays))
    np.testing.assert_allclose(loss.item(), wanted[0], rtol=3e-5, atol=3e-5)
    for got, want in zip(gradients, wanted[1:], strict=True):
        np.testing.assert_allclose(np.array(got), want, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize("training", [True, False])
def test_equal_to_torch_and_to_the_whole(training):
    torch = pytest.importorskip("torch", reason="the oracle needs PyTorch (pip install torch)")
    hidden, weight, targets, weights = make(77, 16, 301)
    found = differentiated(hidden, weight, targets, weights, chunk=20, training=training)
    h, w = (torch.tensor(x, requires_grad=True) for x in (hidden, weight))
    losses = torch.nn.functional.cross_entropy(h @ w.T, torch.tensor(targets), reduction="none")
    (losses * torch.tensor(weights)).sum().backward()
    np.testing.assert_allclose(found[0], (losses.detach().numpy() * weights).sum(), rtol=1e-5)
    np.testing.assert_allclose(found[1], h.grad.numpy(), atol=2e-5)
    np.testing.assert_allclose(found[2], w.grad.numpy(), atol=2e-5)

    def whole(hidden, weight):
        return (cross_entropy(hidden @ weight.T, mx.array(targets)) * mx.array(weights)).sum()

    loss, gradients = mx.value_and_grad(whole, (0, 1))(mx.array(hidden), mx.array(weight))
    np.testing.assert_allclose(found[0], loss.item(), rtol=1e-5)
    for got, want in zip(found[1:], gradients, strict=True):
        np.testing.assert_allclose(got, np.array(want), atol=2e-5)


def test_finite_differences():
    hidden, weight, targets, weights = make(9, 4, 7)
    _, by_hidden, by_weight = differentiated(hidden, weight, targets, weights, chunk=4, softcap=5.0, training=True)
    for array, gradient in ((hidden, by_hidden), (weight, by_weight)):
        for place in np.ndindex(array.shape):
            kept, values = array[place], []
            for step in (1e-3, -1e-3):
                array[place] = kept + step
                values.append(exact(hidden, weight, targets, weights, 5.0)[0])
            array[place] = kept
            assert gradient[place] == pytest.approx((values[0] - values[1]) / 2e-3, abs=2e-4)


def test_gradient_is_scaled_by_its_cotangent():
    hidden, weight, targets, _ = make(10, 4, 7)

    def loss(hidden):
        return linear_cross_entropy(hidden, mx.array(weight), mx.array(targets), chunk=4, training=True)

    gradient = mx.grad(loss)(mx.array(hidden))
    scaled = mx.grad(lambda x: 3 * loss(x))(mx.array(hidden))
    np.testing.assert_allclose(np.array(scaled), 3 * np.array(gradient), rtol=1e-6)


def test_all_weights_zero_and_none():
    hidden, weight, targets, weights = make(10, 4, 7)
    nothing = differentiated(hidden, weight, targets, weights * 0, chunk=3, training=True)
    assert nothing[0] == 0 and not nothing[1].any() and not nothing[2].any()
    arrays = [mx.array(x) for x in (hidden, weight, targets)]
    ones = linear_cross_entropy(*arrays, mx.ones(10), chunk=3)
    assert linear_cross_entropy(*arrays, chunk=3).item() == ones.item()


def test_bfloat16_is_summed_in_float32():
    """4,096 equal rows: sums in bfloat16, of 8 bits, would stop growing at 256 times one of them."""
    hidden, weight, targets, _ = make(1, 8, 32)
    rows = [mx.array(np.repeat(x, 4096, axis=0)) for x in (hidden, targets)]
    half = mx.array(weight).astype(mx.bfloat16)

    def loss(weight):
        return linear_cross_entropy(rows[0].astype(mx.bfloat16), weight, rows[1], chunk=16, training=True)

    found, gradient = mx.value_and_grad(loss)(half)
    assert found.dtype == mx.float32 and gradient.dtype == mx.bfloat16
    rounded = np.array(mx.array(hidden).astype(mx.bfloat16).astype(mx.float32))
    wanted = exact(rounded, np.array(half.astype(mx.float32)), targets, np.ones(1), None)
    assert found.item() == pytest.approx(4096 * wanted[0], rel=0.01)
    largest = np.abs(wanted[2]).max()
    np.testing.assert_allclose(np.array(gradient.astype(mx.float32)) / 4096, wanted[2], atol=0.02 * largest)


def peak(function, *arrays) -> int:
    """Bytes that a second evaluation takes."""
    mx.eval(arrays)
    mx.eval(function(*arrays))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(function(*arrays))
    return mx.get_peak_memory() - before


def test_all_logits_are_never_in_memory():
    n, v = 2048, 1024
    arrays = [mx.array(x) for x in make(n, 4, v)[:3]]

    def chunked(hidden, weight, targets):
        loss = lambda *xs: linear_cross_entropy(*xs, targets, chunk=32, training=True)  # noqa: E731
        return mx.value_and_grad(loss, (0, 1))(hidden, weight)

    def whole(hidden, weight, targets):
        return mx.value_and_grad(lambda h, w: cross_entropy(h @ w.T, targets).sum(), (0, 1))(hidden, weight)

    logits = 4 * n * v
    assert peak(mx.compile(whole), *arrays) > 2 * logits
    assert peak(mx.compile(chunked), *arrays) < logits / 3
    assert peak(chunked, *arrays) < logits / 3


def test_loss_without_training_computes_no_gradient():
    arrays = [mx.array(x) for x in make(32, 1024, 512)[:3]]
    assert peak(lambda *xs: linear_cross_entropy(*xs), *arrays) < arrays[1].nbytes / 2
    assert peak(lambda *xs: linear_cross_entropy(*xs, training=True), *arrays) > arrays[1].nbytes


def test_large_close_logits():
    hidden, weight, targets = mx.array([[1.0]]), mx.array([[30000.0], [29999.5]]), mx.array([1])
    exact = np.log(1 + np.exp(0.5))
    assert linear_cross_entropy(hidden, weight, targets).item() == pytest.approx(exact, rel=1e-6)
    assert cross_entropy(hidden @ weight.T, targets).item() == pytest.approx(exact, rel=1e-6)


def test_bias():
    """Loss and gradients are those of all logits with the bias."""
    hidden, weight, targets, weights = map(mx.array, make(30, 8, 40))
    bias = mx.random.normal((40,), key=mx.random.key(0))

    def chunked(hidden, weight, bias):
        return linear_cross_entropy(hidden, weight, targets, weights, bias=bias, chunk=7, training=True)

    def whole(hidden, weight, bias):
        return (cross_entropy(hidden @ weight.T + bias, targets) * weights).sum()

    (found, gradients), (loss, wanted) = (
        mx.value_and_grad(function, (0, 1, 2))(hidden, weight, bias) for function in (chunked, whole)
    )
    assert abs(found - loss) < 1e-3
    for one, other in zip(gradients, wanted, strict=True):
        assert mx.allclose(one, other, atol=2e-5)
