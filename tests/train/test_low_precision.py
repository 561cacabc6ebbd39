"""Stochastic rounding, int8 averages, and what an update with them computes and holds in memory."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from mlxlm.backend import platform
from mlxlm.backend.mlx import mx
from mlxlm.config.optimizers import OPTIMIZERS
from mlxlm.data import Batch
from mlxlm.model import Decoder
from mlxlm.train import TrainSettings
from mlxlm.train import step as step_module
from mlxlm.train.low_precision import dequantize, quantize, stochastic_round
from mlxlm.train.step import TrainStep

FLOATS = st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False)
KEYS = np.random.default_rng(0).integers(0, 1 << 31, 400, np.uint32)


def means(function, x: np.ndarray) -> np.ndarray:
    """The mean of a function of `x` and a key over keys."""
    return np.mean([np.array(function(mx.array(x), mx.array(key))) for key in KEYS], axis=0)


@settings(max_examples=25, deadline=None)
@given(arrays(np.float32, (8,), elements=FLOATS), st.integers(0, 2**31 - 1))
def test_stochastic_rounding_is_to_a_neighbor(x, key):
    rounded = stochastic_round(mx.array(x), mx.array(key, mx.uint32))
    assert rounded.dtype == mx.bfloat16
    rounded, gap = np.array(rounded.astype(mx.float32)), np.abs(x) * 2.0**-7
    assert (np.abs(rounded - x) <= gap).all()
    exact = np.array(mx.array(x).astype(mx.bfloat16).astype(mx.float32))
    again = stochastic_round(mx.array(exact), mx.array(key, mx.uint32))
    assert (np.array(again.astype(mx.float32)) == exact).all()


def test_stochastic_rounding_is_right_on_average():
    x = np.random.default_rng(1).normal(size=200).astype(np.float32)
    found = means(lambda x, key: stochastic_round(x, key).astype(mx.float32), x)
    errors = (found - x) / (np.abs(x) * 2.0**-7)  # of a gap between bfloat16 numbers, or half of it
    assert np.abs(errors).max() < 0.12 and np.abs(errors.mean()) < 0.01


@settings(max_examples=25, deadline=None)
@example(np.full((3, 16), 1.1754944e-38, np.float32))
@given(arrays(np.float32, (3, 16), elements=st.floats(-(2.0**30), 2.0**30, width=32, allow_subnormal=False)))
def test_int8_is_close(x):
    """Between the codes on both sides; zeros and the largest of a row are exact, and signs stay."""
    for squares, power in ((False, 2), (True, 4)):
        values = np.abs(x) if squares else x
        codes, scale = quantize(mx.array(values), mx.array(5, mx.uint32), squares)
        assert codes.dtype == mx.int8 and scale.shape == (3, 1)
        found = np.array(dequantize(codes, scale, squares), np.float64)
        largest = np.abs(values).max(1, keepdims=True)
        roots = [(np.abs(y) / np.maximum(largest, 1e-30)) ** (1 / power) for y in (found, values.astype(np.float64))]
        assert np.abs(roots[0] - roots[1]).max() < 1.01 / 127
        assert (found * values >= 0).all() and (found[values == 0] == 0).all()
        np.testing.assert_allclose(np.abs(found).max(1), largest[:, 0], rtol=1e-5, atol=1e-30)  # the smallest scale


def test_int8_is_right_on_average():
    x = np.random.default_rng(2).normal(size=(4, 64)).astype(np.float32)
    roots = means(lambda x, key: quantize(x, key)[0].astype(mx.float32), x) / 127
    wanted = np.sign(x) * np.sqrt(np.abs(x) / np.abs(x).max(1, keepdims=True))
    assert np.abs(roots - wanted).max() < 0.1 / 127 and np.abs((roots - wanted).mean()) < 0.01 / 127


def a_step(config, **changes) -> TrainStep:
    model = Decoder(config)
    model.init_weights(0)
    mx.random.seed(0)
    return TrainStep(model, TrainSettings(**{"steps": 50, "learning_rate": 1e-3, "batch_size": 1, **changes}))


def trained(step: TrainStep, steps: int, rate: float = 1e-3) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, 300, (steps, 1, 17)).astype(np.int32)
    for row in tokens:
        mx.eval(step([Batch(row)], rate), step.state)
    return {name: np.array(weight.astype(mx.float32)) for name, weight in step.weights().items()}


@pytest.mark.parametrize("state", ["bfloat16", "int8"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_updates_are_near_those_of_float32(tiny_config, monkeypatch, optimizer, state):
    """The first is the same, since averages are rounded after it; also in several groups of parameters."""
    exact, start = a_step(tiny_config, optimizer=optimizer), trained(a_step(tiny_config), 0)
    first = trained(exact, 1)
    monkeypatch.setattr(step_module, "updated_at_once", lambda count: count // 5)
    step = a_step(tiny_config, optimizer=optimizer, optimizer_state=state)
    assert len(step._groups) > 4 and sum(step._groups, []) == list(start)
    found = trained(step, 1)
    for name, weight in first.items():
        np.testing.assert_allclose(found[name], weight, atol=2e-6, err_msg=name)
    wanted, found = trained(exact, 8), trained(step, 8)
    moved = sum(np.square(wanted[name] - start[name]).sum() for name in start)
    assert sum(np.square(found[name] - wanted[name]).sum() for name in start) < 0.1 * moved


def test_small_steps_of_bfloat16_weights_add_up(tiny_config):
    """100 steps of a hundredth of a bfloat16's last bit."""
    step, exact = a_step(tiny_config, param_dtype="bfloat16"), a_step(tiny_config)
    before = trained(step, 0)
    for each in (step, exact):
        each.model.load_weights([(name, mx.array(x).astype(each.weights()[name].dtype)) for name, x in before.items()])
    found, wanted = trained(step, 100, 1e-5), trained(exact, 100, 1e-5)
    assert step.weights()["model.norm.weight"].dtype == mx.bfloat16
    moves = [np.concatenate([(x[n] - before[n]).ravel() for n in before]) for x in (found, wanted)]
    assert (moves[0] * moves[1]).sum() / (moves[1] ** 2).sum() == pytest.approx(1, abs=0.15)


def test_bfloat16_weights_are_evaluated_in_the_compute_dtype(tiny_config):
    step = a_step(tiny_config, param_dtype="bfloat16", ema_decay=0.5)
    trained(step, 2)
    assert {x.dtype for x in step.weights().values()} == {mx.float32}  # the average
    plain = a_step(tiny_config, param_dtype="bfloat16")
    with plain.evaluation_weights():
        assert plain.model(mx.array([[1, 2]])).dtype == mx.float32
    assert {x.dtype for x in plain.weights().values()} == {mx.bfloat16}


@pytest.mark.parametrize(
    ("changes", "limit"), [({}, 17.5), ({"optimizer": "lion"}, 14), ({"optimizer_state": "int8"}, 13)], ids=str
)
def test_bytes_per_parameter(tiny_config, monkeypatch, changes, limit):
    """AdamW needs 16 bytes: weights, gradients and averages. Without `separate_kernels` it took 26."""
    monkeypatch.setattr(platform, "cpu_cores", lambda: 1)
    monkeypatch.setattr(step_module, "updated_at_once", lambda count: count // 20)
    config = tiny_config.with_changes(hidden_size=256, intermediate_size=512, num_hidden_layers=6, vocab_size=300)
    other = mx.get_active_memory()  # of other tests
    step = a_step(config, **changes)
    batch = [Batch(np.ones((1, 3), np.int32))]
    mx.eval(step(batch, 1e-3), step.state)
    mx.reset_peak_memory()
    mx.eval(step(batch, 1e-3), step.state)
    assert (mx.get_peak_memory() - other) / config.parameter_count() < limit
