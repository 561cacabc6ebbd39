"""µP: weights and learning rates, against explicit multipliers, and the coordinate check."""

import importlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx, nn, tree_flatten, tree_unflatten
from mlxlm.config import ModelConfig
from mlxlm.config.mup import check_mup, mup_factors
from mlxlm.data import Batch
from mlxlm.model import Decoder
from mlxlm.train import TrainSettings
from mlxlm.train.optimizers import default_learning_rate, make_optimizer
from mlxlm.train.step import TrainStep
from mlxlm.utils.errors import ConfigError

RATE = 2e-3


def a_config(**changes):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    return ModelConfig(**{**sizes, "vocab_size": 48, "tie_word_embeddings": True, **changes})


def a_model(config, parametrization="mup"):
    model = Decoder(config)
    model.init_weights(0, parametrization)
    return model


def trained(model, tokens, steps=3, optimizer="adamw", parametrization="mup"):
    settings = TrainSettings(9, RATE, optimizer=optimizer, parametrization=parametrization, grad_clip=0.0)
    step = TrainStep(model, settings)
    for _ in range(steps):
        mx.eval(step([Batch(tokens)], RATE), step.state)
    return model


TOKENS = np.random.default_rng(0).integers(0, 48, (2, 17)).astype(np.int32)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
        {"norm": "layer", "num_key_value_heads": 2, "norm_unit_offset": False},
        {"qk_norm": "head", "norm_unit_offset": True},
    ],
)
def test_equals_a_model_with_multipliers(changes):
    """The rule of the papers: multipliers of logits, scores and sublayers, and 1 / width for matrices of layers."""
    config = a_config(hidden_size=256, num_attention_heads=2, num_hidden_layers=6, **changes)
    width, depth, head = 8.0, 3.0, (16 / 128) ** 0.5
    multipliers = {"logits_scaling": width, "residual_multiplier": 1 / depth, "query_pre_attn_scalar": 128**2 / 16}
    oracle, model = Decoder(config.with_changes(**multipliers)), a_model(config)
    module = "q_norm" if config.qk_norm else "q_proj"
    folded = {"model.norm": width, "o_proj": depth, "down_proj": depth, module: 1 / head}
    offset = 1 if config.norm_unit_offset else 0
    weights, rates = [], {}
    for name, weight in tree_flatten(model.parameters()):
        factor = next((f for part, f in folded.items() if f"{part}." in name), 1.0)
        added = offset if name.endswith("norm.weight") else 0
        weights.append((name, (weight + added) * factor - added))
        rates[name] = RATE / width if ".layers." in name and weight.ndim == 2 else RATE
    oracle.load_weights(weights)
    np.testing.assert_allclose(oracle(mx.array(TOKENS)), model(mx.array(TOKENS)), rtol=1e-3, atol=1e-4)
    trained(model, TOKENS)
    adamw(oracle, rates)
    np.testing.assert_allclose(oracle(mx.array(TOKENS)), model(mx.array(TOKENS)), rtol=2e-2, atol=2e-2)


def adamw(model, rates, steps=3, decay=0.1):
    """Three steps of AdamW with a rate for each weight, whose decay is that of the rate without its factor."""
    names = list(rates)
    m, v = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for step in range(1, steps + 1):

        def loss(parameters):
            model.update(parameters)
            tokens = mx.array(TOKENS)
            return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")

        parameters = model.trainable_parameters()
        weights, gradients = dict(tree_flatten(parameters)), dict(tree_flatten(mx.grad(loss)(parameters)))
        for n in names:
            m[n] = 0.9 * m[n] + 0.1 * gradients[n]
            v[n] = 0.95 * v[n] + 0.05 * gradients[n] ** 2
            update = m[n] / (1 - 0.9**step) / (mx.sqrt(v[n] / (1 - 0.95**step)) + 1e-12)
            weights[n] = weights[n] * (1 - RATE * decay * (weights[n].ndim == 2)) - rates[n] * update
        model.update(tree_unflatten(list(weights.items())))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_base_model_is_the_same_in_both_parametrizations(optimizer):
    config = a_config(hidden_size=32, num_attention_heads=2)
    found = [
        dict(tree_flatten(trained(a_model(config, p), TOKENS, 1, optimizer, p).parameters()))
        for p in ("standard", "mup")
    ]
    for name, weight in found[0].items():
        np.testing.assert_allclose(weight, found[1][name], rtol=1e-6, atol=1e-7, err_msg=name)
    assert default_learning_rate(config, optimizer, "mup") == default_learning_rate(config, optimizer)


@settings(max_examples=20)
@given(st.sampled_from([32, 64, 256]), st.integers(1, 6), st.booleans(), st.sampled_from(["adamw", "muon", "lion"]))
def test_each_weight_has_its_rate_and_the_same_decay(width, layers, tied, name):
    config = a_config(hidden_size=width, num_hidden_layers=layers, tie_word_embeddings=tied)
    model = a_model(config)
    optimizer = make_optimizer(TrainSettings(9, 1.0, optimizer=name, parametrization="mup", weight_decay=0.5), model)
    optimizer.learning_rate = mx.array(RATE)
    assert optimizer.learning_rate.item() == pytest.approx(RATE)
    ones = {n: mx.ones(w.shape) for n, w in tree_flatten(model.parameters())}
    optimizer.init(tree_unflatten(list(ones.items())))
    zeros = tree_unflatten([(n, mx.zeros(w.shape)) for n, w in ones.items()])
    updated = dict(tree_flatten(optimizer.apply_gradients(zeros, tree_unflatten(list(ones.items())))))
    for n, w in updated.items():  # without a gradient, only the decay changes a weight
        np.testing.assert_allclose(w, 1 - RATE * 0.5 * (w.ndim == 2), rtol=1e-6, err_msg=n)
    parts = optimizer._split_dictionary(tree_unflatten(list(ones.items())))
    for part, weights in zip(optimizer.optimizers, parts, strict=True):
        for n, w in tree_flatten(weights) if weights else ():
            factor = mup_factors(config, n, w.ndim, name == "muon")[1]
            assert part.learning_rate.item() == pytest.approx(RATE * factor, rel=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_coordinate_check(optimizer):
    """How far activations move in a few steps doesn't depend on the width; in the standard parametrization it does."""
    mup = importlib.import_module("benchmarks.mup")
    found = {
        p: mup.slopes({w: mup.activation_changes(mup.model_of(w), p, optimizer) for w in (32, 64, 128, 256)})
        for p in ("mup", "standard")
    }
    assert all(abs(slope) < 0.2 for slope in found["mup"].values()), found
    assert found["standard"]["last layer"] > 0.35 and found["standard"]["target logits"] > 0.35, found


@pytest.mark.parametrize(
    ("changes", "optimizer", "part"),
    [
        ({}, "adafactor", "no learning rates for adafactor .try: `optimizer=adamw`"),
        ({"norm_placement": "post"}, "adamw", "no rule for this model's norm_placement .try: `parametrization"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}, "adamw", "experts"),
        ({"qk_norm": "l2"}, "adamw", "qk_norm"),
    ],
)
def test_parts_without_a_rule_are_refused(changes, optimizer, part):
    with pytest.raises(ConfigError, match=part):
        check_mup(a_config(**changes), optimizer)
