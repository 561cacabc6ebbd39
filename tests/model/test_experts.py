"""Mixtures of experts beside a loop over all experts: outputs, gradients, losses of the router."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx, nn, tree_flatten
from mlxlm.config import ModelConfig
from mlxlm.model import Decoder, experts
from mlxlm.model.experts import MixtureOfExperts, SwitchLinear, group_by_expert
from mlxlm.train.optimizers import Muon
from mlxlm.train.settings import TrainSettings
from mlxlm.train.step import TrainStep, cross_entropy_loss

HIDDEN = 16
SIZES = {
    "hidden_size": HIDDEN, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "vocab_size": 31, "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
}  # fmt: skip
KINDS = {
    "softmax": {},
    "not normalized, without a gate": {"norm_topk_prob": False, "mlp_gated": False, "hidden_act": "relu2"},
    "biased": {"mlp_bias": True},
    "shared": {"shared_expert_intermediate_size": 8, "shared_expert_gate": True},
    "sigmoid": {"router": "sigmoid", "routed_scaling_factor": 1.5, "shared_expert_intermediate_size": 8},
    "scaled": {"enable_moe_block": True, "rms_norm_eps": 0.1},
    "groups": {"router": "sigmoid", "num_experts": 6, "n_group": 3, "topk_group": 2},
}


def make(kind):
    config = ModelConfig(**{**SIZES, **KINDS[kind]})
    model, rng = MixtureOfExperts(config), np.random.default_rng(0)
    weights = {name: rng.normal(0, 0.3, value.shape) for name, value in tree_flatten(model.parameters())}
    model.load_weights([(name, mx.array(value.astype(np.float32))) for name, value in weights.items()])
    return config, model


def router_input(x):
    return 3 * x[..., ::-1]


def call(model, x):
    return model(x, router_input(x)) if "router_scale" in model else model(x)


def every_expert(model, config, x):
    """The mixture by its definition: all experts for all tokens, and weights that are mostly 0."""
    x = x.reshape(-1, HIDDEN)
    read = x
    if config.enable_moe_block:
        read = router_input(x)
        size = mx.sqrt(read.square().mean(axis=-1, keepdims=True) + config.rms_norm_eps)
        read = read / size * model.router_scale / HIDDEN**0.5
    logits = read @ model.gate.weight.T
    scores = mx.softmax(logits, axis=-1) if config.router == "softmax" else mx.sigmoid(logits)
    preferred = mx.stop_gradient(scores)
    if config.router == "sigmoid":
        preferred = preferred + model.gate.e_score_correction_bias
    preferred = np.array(preferred)
    if config.n_group > 1:
        groups = preferred.reshape(len(preferred), config.n_group, -1)
        best = np.sort(groups, axis=-1)[..., -2:].sum(-1)
        worst = np.argsort(best, axis=-1)[:, : config.n_group - config.topk_group]
        np.put_along_axis(groups, worst[..., None], -np.inf, axis=1)
        preferred = groups.reshape(preferred.shape)
    chosen = np.zeros(preferred.shape, np.float32)
    np.put_along_axis(chosen, np.argsort(-preferred, axis=-1)[:, : config.num_experts_per_tok], 1, axis=-1)
    weights = scores * mx.array(chosen)
    if config.norm_topk_prob:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    weights = weights * model.get("per_expert_scale", 1)
    out = 0
    for expert in range(config.num_experts):
        layers = {}
        for name in ("gate_proj", "up_proj", "down_proj"):
            layer = model.switch_mlp.get(name)
            bias = layer.bias[expert] if layer is not None and "bias" in layer else 0
            layers[name] = lambda v, layer=layer, bias=bias: v @ layer.weight[expert].T + bias  # noqa: B023
        up = layers["up_proj"](x)
        inner = nn.silu(layers["gate_proj"](x)) * up if config.mlp_gated else nn.relu2(up)
        out = out + layers["down_proj"](inner) * weights[:, expert : expert + 1]
    out = out * config.routed_scaling_factor
    if "shared_expert" in model:
        shared = model.shared_expert(x[None])[0]
        gate = mx.sigmoid(x @ model.shared_expert_gate.weight.T) if "shared_expert_gate" in model else 1
        out = out + gate * shared
    return out


@pytest.mark.parametrize("tokens", [1, 7, 40, 300])  # single rows, and blocks of several sizes
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients(kind, tokens):
    config, model = make(kind)
    x = mx.random.normal((1, tokens, HIDDEN), key=mx.random.key(1))
    wanted = every_expert(model, config, x)
    model.eval()
    np.testing.assert_allclose(np.array(call(model, x))[0], np.array(wanted), atol=2e-5)
    model.train()
    factors = mx.random.normal((tokens, HIDDEN), key=mx.random.key(2))

    def loss(parameters, x, function):
        model.update(parameters)
        return (function(x).reshape(-1, HIDDEN) * factors).sum()

    gradients = mx.grad(loss, argnums=(0, 1))
    found = gradients(model.parameters(), x, lambda x: call(model, x))
    expected = gradients(model.parameters(), x, lambda x: every_expert(model, config, x))
    for (name, ours), (_, theirs) in zip(tree_flatten(found), tree_flatten(expected), strict=True):
        np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=1e-4, err_msg=name)


@settings(max_examples=60)
@given(st.integers(1, 9), st.integers(1, 200), st.integers(1, 3), st.integers(0, 99))
def test_groups(num_experts, tokens, used, seed):
    """Each pair is in one row, in a block of its expert; no other row counts."""
    rng = np.random.default_rng(seed)
    used = min(used, num_experts)
    chosen = np.stack([rng.permutation(num_experts)[:used] for _ in range(tokens)])
    if seed % 3 == 0:  # all tokens to the same experts
        chosen = np.broadcast_to(chosen[:1], chosen.shape)
    groups = group_by_expert(mx.array(chosen), num_experts)
    rows, pairs = np.array(groups.rows), np.array(groups.pairs)
    assert sorted(rows.flatten()) == list(np.flatnonzero(np.array(groups.used)))
    np.testing.assert_array_equal(pairs[rows.flatten()], np.arange(tokens * used))
    np.testing.assert_array_equal(np.array(groups.experts)[rows // groups.size], chosen)
    assert len(pairs) == len(groups.experts) * groups.size
    assert (np.diff(np.array(groups.experts)) >= 0).all()


def test_single_rows_in_order(monkeypatch):
    """As on a GPU, in training and in inference."""
    monkeypatch.setattr(experts, "_MAX_BLOCK", 1)
    test_outputs_and_gradients("softmax", 300)


@pytest.mark.parametrize("tokens", [3, 90])
@pytest.mark.parametrize(("bits", "mode"), [(4, "affine"), (8, "mxfp8")])
def test_quantized_experts(bits, mode, tokens):
    layer = SwitchLinear(64, 12, 5, bias=True)
    layer.weight, layer.bias = mx.random.normal((5, 12, 64), key=mx.random.key(0)), mx.arange(60.0).reshape(5, 12)
    quantized = layer.to_quantized(32, bits, mode)
    parts = quantized.weight, quantized.scales, quantized.get("biases")
    layer.weight = mx.dequantize(*parts, group_size=32, bits=bits, mode=mode)
    layer.eval()
    chosen = mx.random.randint(0, 5, (tokens, 2), key=mx.random.key(1))
    if tokens < 10:
        groups, shape = chosen, (tokens, 1, 1, 64)
    else:
        groups = group_by_expert(chosen, 5)
        shape = len(groups.experts), groups.size, 64
    x = mx.random.normal(shape, key=mx.random.key(2))
    np.testing.assert_allclose(np.array(quantized(x, groups)), np.array(layer(x, groups)), atol=1e-4)


def test_losses_of_the_router():
    """The gradient is that of the sum of the losses of all layers, also if layers are recomputed."""
    config = ModelConfig(**SIZES)
    tokens = np.random.default_rng(0).integers(0, 31, (2, 9))
    settings = TrainSettings(steps=1, learning_rate=1.0, batch_size=2, router_aux_loss=0.3, router_z_loss=0.2)
    model = Decoder(config)
    model.init_weights(0)
    for layer in model.layers:  # from small weights, the losses would be next to nothing
        layer.mlp.gate.weight = 5 * layer.mlp.gate.weight
    TrainStep(model, settings)
    seen = []

    class Recorded(MixtureOfExperts):
        def _router_loss(self, logits, scores, chosen):
            z = mx.log(mx.exp(logits).sum(-1)).square().mean()
            share = [(np.array(mx.stop_gradient(chosen)) == expert).mean() for expert in range(self.num_experts)]
            seen.append(8 * 2 * (0.2 * z + 0.3 * 5 * (mx.array(np.float32(share)) * scores.mean(0)).sum()))
            return mx.array(0.0)

    def loss(parameters, recorded):
        model.update(parameters)
        total = cross_entropy_loss(model, mx.array(tokens))[0]
        return total + sum(seen) if recorded else total

    model.train()
    parameters = model.trainable_parameters()
    _, found = mx.value_and_grad(loss)(parameters, False)
    model.model.grad_checkpoint = True
    _, recomputed = mx.value_and_grad(loss)(parameters, False)
    model.model.grad_checkpoint = False
    for layer in model.layers:
        layer.mlp.__class__ = Recorded
    _, wanted = mx.value_and_grad(loss)(parameters, True)
    router = wanted["model"]["layers"][0]["mlp"]["gate"]["weight"]
    assert np.abs(np.array(router)).max() > 0.1
    for gradients in (found, recomputed):
        for (name, ours), (_, theirs) in zip(tree_flatten(gradients), tree_flatten(wanted), strict=True):
            np.testing.assert_allclose(np.array(ours), np.array(theirs), atol=1e-4, err_msg=name)


def test_load_of_the_busiest_expert():
    config = ModelConfig(**{**SIZES, "num_experts": 4, "num_experts_per_tok": 1})
    model = Decoder(config)
    model.init_weights(0)
    model.eval()
    tokens = mx.random.randint(0, 31, (2, 90), key=mx.random.key(0))
    chosen = []
    for layer in model.layers:
        choose = layer.mlp.choose
        layer.mlp.choose = lambda scores, choose=choose: chosen.append(choose(scores)) or chosen[-1]
    with experts.expert_load(model.layers) as load:
        mx.eval(model(tokens[:1]), model(tokens[1:]))
        found = load()
    counts = [np.bincount(np.concatenate(chosen[i::2]).flatten(), minlength=4) for i in range(2)]
    assert found == pytest.approx(max(count.max() / count.mean() for count in counts)) and found > 1
    mx.eval(model(tokens))
    assert all(layer.mlp._counts is None for layer in model.layers)
    with experts.expert_load([Decoder(ModelConfig(16, 1, 2, 24, 31)).layers[0]]) as load:
        assert load() is None


def test_muon_updates_each_expert():
    gradient, weight = mx.random.normal((2, 3, 4, 6), key=mx.random.key(0))
    optimizer = Muon(0.1, 0.2)
    state = {"v": mx.zeros(weight.shape)}
    found = optimizer.apply_single(gradient, weight, state)
    for expert in range(3):
        alone = {"v": mx.zeros((4, 6))}
        wanted = optimizer.apply_single(gradient[expert], weight[expert], alone)
        np.testing.assert_allclose(np.array(found[expert]), np.array(wanted), atol=1e-6)
        np.testing.assert_allclose(np.array(state["v"][expert]), np.array(alone["v"]), atol=1e-6)
