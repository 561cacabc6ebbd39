"""The distillation loss and its gradient against PyTorch in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from mlxlm.kernels import Distillation, LinearLogits, linear_cross_entropy, linear_distillation_loss

torch = pytest.importorskip("torch", reason="the oracle needs PyTorch (pip install torch)")


def make(n: int, v: int, seed: int = 0):
    """hidden, weight and bias of student and teacher, which differ in width; targets and weights."""
    rng = np.random.default_rng(seed)
    student, teacher = ([rng.normal(size=shape).astype(np.float32) for shape in ((n, h), (v, h), (v,))] for h in (3, 5))
    return student, teacher, rng.integers(0, v, n), rng.choice([0.0, 0.5, 1.0], size=n).astype(np.float32)


def in_float64(student, teacher, targets, weights, softcap, distillation):
    """Loss, cross-entropy, KL divergence and the student's gradients by PyTorch."""
    student = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in student]
    teacher = [torch.tensor(x, dtype=torch.float64) for x in teacher]
    targets, weights = torch.tensor(targets), torch.tensor(weights, dtype=torch.float64)

    def logits(hidden, weight, bias):
        out = hidden @ weight.T + bias
        return out if softcap is None else softcap * torch.tanh(out / softcap)

    z, t = logits(*student), distillation.temperature
    log_q, log_p = (torch.log_softmax(x / t, -1) for x in (z, logits(*teacher)))
    if (k := distillation.top_k) is not None and k < log_p.shape[-1]:
        order = log_p.argsort(-1, descending=True)

        def merge(x):
            x = torch.gather(x, -1, order)
            return torch.cat([x[:, :k], torch.logsumexp(x[:, k:], -1, keepdim=True)], -1)

        log_q, log_p = merge(log_q), merge(log_p)
    kl = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    cross_entropy = torch.nn.functional.cross_entropy(z, targets, reduction="none")
    kl, cross_entropy = (kl * weights).sum(), (cross_entropy * weights).sum()
    loss = (1 - distillation.kd_ratio) * cross_entropy + distillation.kd_ratio * t**2 * kl
    loss.backward()
    return [x.item() for x in (loss, cross_entropy, kl)], [x.grad.numpy() for x in student]


@settings(max_examples=20)
@given(
    n=st.integers(1, 20), v=st.integers(1, 33), chunk=st.integers(1, 25), softcap=st.sampled_from([None, 2.0]),
    ratio=st.sampled_from([0.0, 0.3, 1.0]), temperature=st.sampled_from([1.0, 2.5]),
    top_k=st.none() | st.integers(1, 40), training=st.booleans(),
)  # fmt: skip
def test_equal_to_torch(n, v, chunk, softcap, ratio, temperature, top_k, training):
    student, teacher, targets, weights = make(n, v)
    distillation = Distillation(ratio, temperature, top_k)

    def run(student, teacher, targets, weights):
        def loss(*student):
            logits = (LinearLogits(*x, softcap) for x in (student, teacher))
            return linear_distillation_loss(*logits, targets, weights, distillation, chunk=chunk, training=training)

        # Gradients of the second and third result are 0, so they are those of the first.
        values, gradients = mx.value_and_grad(lambda *xs: sum(loss(*xs)), (0, 1, 2))(*student)
        return loss(*student), values, gradients

    arrays = [[mx.array(x) for x in part] for part in (student, teacher)]
    arrays = *arrays, mx.array(targets), mx.array(weights)
    values, total, gradients = run(*arrays)
    wanted, wanted_gradients = in_float64(student, teacher, targets, weights, softcap, distillation)
    np.testing.assert_allclose([x.item() for x in values], wanted, rtol=3e-5, atol=3e-5)
    assert total.item() == pytest.approx(sum(wanted), rel=3e-5, abs=1e-4)
    for got, want in zip(gradients, wanted_gradients, strict=True):
        np.testing.assert_allclose(np.array(got), want, rtol=1e-4, atol=5e-5)


def test_far_apart_and_equal():
    """Logits of hundreds, as of confident models; a student that equals its teacher has no gradient."""
    student, teacher, targets, weights = make(8, 50)
    student[1] *= 100
    teacher[1] *= 100
    for top_k in (None, 4):
        distillation = Distillation(1.0, 1.0, top_k)
        arrays = [LinearLogits(*map(mx.array, x)) for x in (student, teacher)]
        rest = mx.array(targets), mx.array(weights), distillation
        found = linear_distillation_loss(*arrays, *rest)[2].item()
        if top_k is None:
            assert found == pytest.approx(in_float64(student, teacher, targets, weights, None, distillation)[0][2])
        assert np.isfinite(found)

        def loss(hidden, same=arrays[1], rest=rest):
            return linear_distillation_loss(LinearLogits(hidden, same.weight, same.bias), same, *rest, training=True)[0]

        value, gradient = mx.value_and_grad(loss)(arrays[1].hidden)
        assert value.item() == pytest.approx(0, abs=1e-5) and mx.abs(gradient).max().item() < 1e-3


def test_without_a_weight_for_the_teacher_it_is_the_cross_entropy():
    student, teacher, targets, weights = make(8, 50)
    arrays = [LinearLogits(*map(mx.array, x)) for x in (student, teacher)]
    rest = mx.array(targets), mx.array(weights)
    found = linear_distillation_loss(*arrays, *rest, Distillation(0.0), training=True)[0]
    wanted = linear_cross_entropy(*map(mx.array, student[:2]), *rest, bias=mx.array(student[2]), training=True)
    assert mx.array_equal(found, wanted)
