"""Optimizers against their formulas in float64, their state, and default hyperparameters."""

import numpy as np
import pytest

from mlxlm.backend.mlx import mx, tree_flatten, tree_unflatten
from mlxlm.config.optimizers import OPTIMIZERS
from mlxlm.data import Batch
from mlxlm.model import Decoder
from mlxlm.train import TrainSettings
from mlxlm.train.optimizers import default_learning_rate, learning_rate_by_size, make_optimizer
from mlxlm.train.step import TrainStep

RATE = 0.01


def adamw(weight, gradient, state, step, s, decay):
    state["m"] = s.beta1 * state.get("m", 0) + (1 - s.beta1) * gradient
    state["v"] = s.beta2 * state.get("v", 0) + (1 - s.beta2) * gradient**2
    m, v = state["m"] / (1 - s.beta1**step), state["v"] / (1 - s.beta2**step)
    return weight - RATE * (m / (np.sqrt(v) + 1e-8) + decay * weight)


def lion(weight, gradient, state, step, s, decay):
    m = state.get("m", np.zeros_like(weight))
    direction = np.sign(s.beta1 * m + (1 - s.beta1) * gradient)
    state["m"] = s.beta2 * m + (1 - s.beta2) * gradient
    return weight - RATE * (direction + decay * weight)


def adafactor(weight, gradient, state, step, s, decay):
    """Shazeer & Stern 2018, algorithms 4 and 5."""
    beta2 = 1 - step**-0.8
    squares = gradient**2 + 1e-30
    if weight.ndim == 2:
        state["r"] = beta2 * state.get("r", 0) + (1 - beta2) * squares.mean(1)
        state["c"] = beta2 * state.get("c", 0) + (1 - beta2) * squares.mean(0)
        second = np.outer(state["r"], state["c"]) / state["r"].mean()
    else:
        state["v"] = second = beta2 * state.get("v", 0) + (1 - beta2) * squares
    update = gradient / np.sqrt(second)
    update /= max(1, np.sqrt((update**2).mean()))
    rate = RATE * max(1e-3, np.sqrt((weight**2).mean()))
    return weight * (1 - decay * rate) - rate * update


def muon(weight, gradient, state, step, s, decay):
    """Jordan et al. 2024; scale and decay of Liu et al. 2025, equations 2 and 4."""
    state["v"] = 0.95 * state.get("v", 0) + 0.05 * gradient
    x = 0.05 * gradient + 0.95 * state["v"]
    x = x / np.linalg.norm(x)
    if x.shape[0] > x.shape[1]:
        x = x.T
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    x = x if x.shape == weight.shape else x.T
    return weight - RATE * (0.2 * np.sqrt(max(weight.shape)) * x + decay * weight)


REFERENCES = {"adamw": adamw, "lion": lion, "adafactor": adafactor, "muon": muon}


def tree(arrays: dict) -> dict:
    return tree_unflatten([(name, mx.array(np.asarray(x, np.float32))) for name, x in arrays.items()])


def names_and_shapes():
    return {
        "model.embed_tokens.weight": (12, 6), "lm_head.weight": (12, 6), "model.norm.weight": (6,),
        "model.layers.0.mlp.up_proj.weight": (10, 6), "model.layers.0.mlp.down_proj.weight": (6, 10),
        "model.layers.0.input_layernorm.weight": (6,),
    }  # fmt: skip


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_updates_equal_the_formulas(name):
    settings = TrainSettings(steps=9, learning_rate=RATE, optimizer=name, weight_decay=0.3)
    rng = np.random.default_rng(0)
    weights = {n: rng.normal(size=shape) for n, shape in names_and_shapes().items()}
    optimizer, states = make_optimizer(settings), {n: {} for n in weights}
    model = tree(weights)
    optimizer.init(model)
    for step in range(1, 5):
        gradients = {n: rng.normal(size=w.shape) * 10 ** rng.uniform(-3, 1) for n, w in weights.items()}
        model = optimizer.apply_gradients(tree(gradients), model)
        found = dict(tree_flatten(model))
        for n, weight in weights.items():
            kind = name if name != "muon" or (".layers." in n and weight.ndim == 2) else "adamw"
            decay = 0.3 if weight.ndim == 2 else 0.0
            weights[n] = REFERENCES[kind](weight, gradients[n], states[n], step, settings, decay)
            np.testing.assert_allclose(np.array(found[n]), weights[n], rtol=1e-4, atol=2e-5, err_msg=f"{n} {step}")


@pytest.mark.parametrize("shape", [(48, 64), (32, 128), (128, 32)])
def test_muon_update_is_orthogonal_and_as_large_as_that_of_adamw(shape):
    """Singular values between 0.68 and 1.13 (Jordan et al. 2024), here times 0.2 · sqrt(max(shape))."""
    optimizer = make_optimizer(TrainSettings(steps=9, learning_rate=1.0, optimizer="muon", weight_decay=0.0))
    gradient = mx.random.normal(shape, key=mx.random.key(0))
    names = ("model.layers.0.w", "model.embed_tokens.weight", "model.norm.weight")
    parameters = tree({name: np.zeros(s) for name, s in zip(names, (shape, (4, 4), (4,)), strict=True)})
    optimizer.init(parameters)
    gradients = tree({name: np.ones(s) for name, s in zip(names, (shape, (4, 4), (4,)), strict=True)})
    gradients["model"]["layers"][0]["w"] = gradient
    update = -np.array(optimizer.apply_gradients(gradients, parameters)["model"]["layers"][0]["w"])
    values = np.linalg.svd(update, compute_uv=False) / (0.2 * np.sqrt(max(shape)))
    assert values.min() > 0.6 and values.max() < 1.25
    assert np.sqrt((update**2).mean()) == pytest.approx(0.2, rel=0.2)


@pytest.mark.parametrize(
    ("optimizer", "dtypes"),
    [
        *((optimizer, {}) for optimizer in OPTIMIZERS),
        ("adamw", {"optimizer_state": "int8", "param_dtype": "bfloat16"}),
        ("muon", {"optimizer_state": "bfloat16"}),
    ],
)
def test_loaded_state_continues_bit_equal(optimizer, dtypes, tiny_config, tmp_path):
    rng = np.random.default_rng(0)
    batches = [[Batch(rng.integers(0, 300, (2, 9)).astype(np.int32))] for _ in range(3)]
    rate = learning_rate_by_size(10**6, optimizer)
    settings = TrainSettings(steps=9, learning_rate=rate, optimizer=optimizer, dropout=0.1, ema_decay=0.9, **dtypes)

    def fresh() -> TrainStep:
        model = Decoder(tiny_config, dropout=0.1)
        model.init_weights(0)
        mx.random.seed(0)
        return TrainStep(model, settings)

    def trained(step, batches):
        for batch in batches:
            mx.eval(step(batch, rate), step.state)
        return {**step.weights(), **{f"state.{n}": x for n, x in step.save_state().items()}}

    whole = trained(fresh(), batches)
    first, second = fresh(), fresh()
    trained(first, batches[:1])
    mx.save_safetensors(str(tmp_path / "w.safetensors"), first.weights())
    mx.save_safetensors(str(tmp_path / "s.safetensors"), first.save_state())
    second.load(mx.load(str(tmp_path / "w.safetensors")), mx.load(str(tmp_path / "s.safetensors")))
    found = trained(second, batches[1:])
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        assert mx.array_equal(found[name], value), name


def test_learning_rate_by_size():
    assert learning_rate_by_size(125 * 10**6) == pytest.approx(6e-4)
    assert learning_rate_by_size(1) == 0.01
    assert learning_rate_by_size(10**6, "muon") == learning_rate_by_size(10**6)
    assert learning_rate_by_size(10**6, "lion") == pytest.approx(
        learning_rate_by_size(10**6) * OPTIMIZERS["lion"].lr_scale
    )
    assert learning_rate_by_size(10**9, "adafactor") == 0.01 < learning_rate_by_size(10**6, "adafactor")


def test_learning_rate_of_post_norm_models(tiny_config):
    size = learning_rate_by_size(tiny_config.parameter_count())
    assert default_learning_rate(tiny_config) == size
    post = tiny_config.with_changes(norm_placement="post")
    assert default_learning_rate(post) == pytest.approx(size / 3, rel=0.01)
