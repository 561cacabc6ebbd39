"""Models of mlx_lm's classes: quantized like mlx_lm does it, and read by mlx_lm as by mlxlm."""

from __future__ import annotations

import json
import re
from functools import partial

import numpy as np
import pytest

from mlxlm.backend.mlx import mx, nn, tree_flatten
from mlxlm.cache.kv_cache import KVCache
from mlxlm.checkpoint import load_model, load_weights, save_weights
from mlxlm.checkpoint.load import load_checkpoint
from mlxlm.checkpoint.open import open_module_checkpoint
from mlxlm.config.quantization import Format
from mlxlm.convert import convert
from mlxlm.generation import greedy_tokens
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.model.latent_attention import HeadLinear
from mlxlm.quantize import awq, calibrate, pipeline, quantize
from mlxlm.quantize.awq import apply_best_scales, find_scale_groups
from mlxlm.quantize.calibrate import ExpertInputs
from mlxlm.quantize.intercept import intercept
from mlxlm.quantize.layers import layers_of
from mlxlm.tokenizer import load as load_tokenizer
from mlxlm.utils.errors import ArgumentError, CheckpointError
from tests.mixtures import KINDS, VOCABULARY, write_mixture

mlx_lm = pytest.importorskip("mlx_lm.utils", reason="the oracle is mlx_lm")

PROMPT = [5, 60, 7, 200, 9, 11, 33, 250]


@pytest.fixture(scope="module")
def mixtures(tiny_tokenizer, tmp_path_factory):
    """`mixtures(kind)`: the folder of a model, which is written once."""
    root, written = tmp_path_factory.mktemp("mixtures"), set()

    def folder(kind):
        if kind not in written:
            written.add(kind)
            write_mixture(root / kind, kind, tiny_tokenizer)
        return root / kind

    return folder


def loaded_by_mlx_lm(folder):
    model, config = mlx_lm.load_model(folder, lazy=True)
    return model, config


def assert_runs_alike(folder, count=8):
    """mlx_lm and mlxlm read a folder as the same model."""
    theirs, _ = loaded_by_mlx_lm(folder)
    theirs.set_dtype(mx.float32)
    ours = load_model(folder)[0]
    ours.set_dtype(mx.float32)
    wanted = list(greedy_tokens(DecodeStep(ours), PROMPT, count))
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(theirs(mx.array([tokens]))[0, -1].argmax().item())
    assert tokens[len(PROMPT) :] == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_rounding_equals_mlx_lm(kind, mixtures, tmp_path):
    source = mixtures(kind)
    report = quantize(source, tmp_path / "out", group_size=32, method="rtn", evaluate=False)
    assert {check.name: check.result for check in report.checks} == dict.fromkeys(
        ("tensors", "tokenizer", "configuration"), "equal"
    )
    convert(source, tmp_path / "converted")  # mlx_lm can't read what transformers 5 writes
    model, config = loaded_by_mlx_lm(tmp_path / "converted")
    model, _ = mlx_lm.quantize_model(model, config, 32, 4)
    wanted, found = dict(tree_flatten(model.parameters())), load_weights(tmp_path / "out")
    assert set(found) == set(wanted)
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype and mx.array_equal(found[name], value), name
    assert_runs_alike(tmp_path / "out")
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["quantization"] == values["quantization_config"] and values["model_type"] == kind.removesuffix(
        "_text"
    )
    tokenizers = [load_tokenizer(folder) for folder in (source, tmp_path / "out")]
    assert tokenizers[0].chat_template == tokenizers[1].chat_template is not None


def test_bits_are_searched_for_a_size(mixtures, tmp_path, texts):
    report = quantize(
        mixtures("exaone_moe"),
        tmp_path / "out",
        target_bpw=5.6,
        group_size=32,
        calibration_text=texts[0],
        evaluate=False,
    )
    assert 5.2 < report.bits_per_weight <= 5.6
    assert len(set(report.bits.values())) > 2
    assert_runs_alike(tmp_path / "out", 4)


def test_routers_keep_the_bits_of_the_class_in_a_search(mixtures, tmp_path, texts):
    report = quantize(mixtures("granitemoe"), tmp_path / "out", max_size=130_000, calibration_text=texts[0])
    routers = {bits for name, bits in report.bits.items() if name.endswith("router.layer")}
    assert routers == {8} and report.bytes <= 130_000
    assert report.metrics.hidden_state_errors == {} and 0 < report.metrics.kl < 1


@pytest.mark.parametrize("kind", ["exaone_moe", "granitemoe"])
def test_calibration_reduces_the_divergence(kind, mixtures, tmp_path, texts):
    settings = {"bits": 3, "group_size": 32, "eval_text": texts[1]}
    rounded = quantize(mixtures(kind), tmp_path / "rtn", method="rtn", **settings)
    report = quantize(mixtures(kind), tmp_path / "gptq", method="gptq", calibration_text=texts[0], **settings)
    assert report.metrics.kl < 0.9 * rounded.metrics.kl and report.bits == rounded.bits
    assert set(report.errors) == set(report.bits)
    assert_runs_alike(tmp_path / "gptq", 4)


@pytest.mark.parametrize("kind", [*KINDS, "granitemoe:float32"])
def test_layers_one_after_another_are_the_model(kind, mixtures, tiny_tokenizer, tmp_path):
    name, _, dtype = kind.partition(":")
    folder = write_mixture(tmp_path / name, name, tiny_tokenizer, dtype) if dtype else mixtures(name)
    checkpoint = open_module_checkpoint(folder)
    tokens = mx.array(np.random.default_rng(0).integers(0, VOCABULARY, (2, 40)))
    layers = layers_of(checkpoint)
    [state] = layers.embed([tokens])
    for index, _ in enumerate(layers.names):
        state = layers.run(layers.load(index), index, 0, state)
        mx.eval(state)
    [(head, found)] = layers.head_inputs(0, state).items()
    assert head.endswith("lm_head") or head == layers.tied_table
    model, _ = load_checkpoint(checkpoint)
    wanted = []
    module = dict(model.named_modules())[head]
    intercept(
        module, "as_linear" if layers.tied_table else "__call__", lambda original, x: wanted.append(x) or original(x)
    )
    model(tokens)
    np.testing.assert_array_equal(np.array(found), np.array(wanted[0]))


@pytest.mark.parametrize(
    ("factor", "cache", "problem"), [(2, None, "something between its layers"), (1, KVCache(), "share keys and values")]
)
def test_a_model_that_is_not_one_layer_after_another_is_not_calibrated(
    factor, cache, problem, mixtures, monkeypatch, tmp_path, texts
):
    granitemoe = pytest.importorskip("mlx_lm.models.granitemoe")

    def call(self, inputs, *_, **__):
        x = self.embed_tokens(inputs)
        for layer in self.layers:
            x = layer(x, "causal", cache)
            x = factor * x if factor > 1 else x
        return self.norm(x)

    source = mixtures("granitemoe")
    monkeypatch.setattr(granitemoe.GraniteMoEModel, "__call__", call)
    with pytest.raises(ArgumentError, match=f"granitemoe models can't be calibrated: .* {problem} .try: .*rtn"):
        quantize(source, tmp_path / "out", method="gptq", calibration_text=texts[0], evaluate=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shape", [(2, 5, 1, 1, 8), (2, 5, 3, 1, 8), (30, 1, 8)], ids=str)
def test_moments_of_each_expert(shape):
    """Inputs of several experts, of one each, and sorted."""
    rng = np.random.default_rng(0)
    x, experts = rng.normal(size=shape).astype(np.float32), rng.integers(0, 4, (2, 5, 3))
    experts = experts.reshape(-1) if len(shape) == 3 else experts
    inputs = ExpertInputs(mx.array(x), mx.array(experts))
    rows = np.broadcast_to(x[..., 0, :], (*experts.shape, 8))
    for expert in range(5):
        chosen = rows[experts == expert]
        count, stats = inputs.of(expert)
        assert count == len(chosen)
        np.testing.assert_allclose(stats.moments, chosen.T @ chosen if count else 0, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ours", [True, False])
def test_moments_of_matrices_of_heads(ours):
    """Of latent vectors, which one matrix of each head is multiplied with as it is, the other one transposed."""
    mla = pytest.importorskip("mlx_lm.models.mla")
    block, latents = nn.Module(), mx.random.normal((2, 1, 10, 8), key=mx.random.key(0))
    sizes = {"embed_q": (16, 8), "unembed_out": (8, 12)}
    for name, (inputs, outputs) in sizes.items():
        block[name] = HeadLinear(4, inputs, outputs) if ours else mla.MultiLinear(inputs, outputs, 4)
    with calibrate.recording(block) as stats:
        block.embed_q(latents, transpose=False)
        block.unembed_out(latents)
    rows = np.array(latents).reshape(-1, 8)
    assert {name: of_layer.transposed for name, of_layer in stats.items()} == {"embed_q": True, "unembed_out": False}
    for of_layer in stats.values():
        np.testing.assert_allclose(of_layer.moments, rows.T @ rows, rtol=1e-5)


def test_latent_attention_is_calibrated(mixtures, tmp_path, texts):
    """By GPTQ; AWQ rounds these matrices."""
    settings = {"bits": 3, "group_size": 32, "eval_text": texts[1]}
    rounded = quantize(mixtures("deepseek_v3"), tmp_path / "rtn", method="rtn", **settings)
    settings["calibration_text"] = texts[0]
    report = quantize(mixtures("deepseek_v3"), tmp_path / "gptq", method="gptq", **settings)
    quantize(mixtures("deepseek_v3"), tmp_path / "awq", method="awq", **settings)
    assert report.metrics.kl < 0.5 * rounded.metrics.kl and report.bits == rounded.bits
    plain, calibrated, scaled = (load_weights(tmp_path / method) for method in ("rtn", "gptq", "awq"))
    for name in (f"model.layers.{i}.self_attn.{part}.weight" for i in (0, 1) for part in ("embed_q", "unembed_out")):
        assert mx.array_equal(scaled[name], plain[name]) and not mx.array_equal(calibrated[name], plain[name])
    assert_runs_alike(tmp_path / "gptq", 2)


def test_experts_with_few_tokens_are_rounded(mixtures, tmp_path, texts, monkeypatch):
    settings = {"bits": 4, "group_size": 32, "evaluate": False}
    quantize(mixtures("granitemoe"), tmp_path / "rtn", method="rtn", **settings)
    settings |= {"method": "gptq", "calibration_text": texts[0]}
    reports = [quantize(mixtures("granitemoe"), tmp_path / "gptq", **settings)]
    monkeypatch.setattr(calibrate, "MIN_EXPERT_TOKENS", 10**6)
    reports.append(quantize(mixtures("granitemoe"), tmp_path / "few", **settings))
    experts = "model.layers.{}.block_sparse_moe.switch_mlp.{}_proj"
    names = [experts.format(i, part) for i in (0, 1) for part in ("gate", "up", "down")]
    assert reports[0].rounded_experts == {} and reports[1].rounded_experts == dict.fromkeys(names, 4)
    calibrated, few, rounded = (load_weights(tmp_path / name) for name in ("gptq", "few", "rtn"))
    for name in (f"{name}.weight" for name in names):
        assert mx.array_equal(few[name], rounded[name]) and not mx.array_equal(calibrated[name], rounded[name])


def test_an_evaluation_needs_memory(mixtures, tmp_path, texts, monkeypatch):
    source = mixtures("granitemoe")
    monkeypatch.setattr(pipeline.platform, "total_memory", lambda: 10**6)
    with pytest.raises(CheckpointError, match="needs .* GB of memory for the two models .try: .*evaluat"):
        quantize(source, tmp_path / "out", method="rtn", eval_text=texts[1])


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_5_moe_text", "granitemoehybrid", "gemma4_text"])
def test_experts_of_the_decoder(kind, mixtures, tmp_path, texts):
    """Every method; mlx_lm reads the results as mlxlm does."""
    settings = {"bits": 3, "group_size": 32, "eval_text": texts[1]}
    rounded = quantize(mixtures(kind), tmp_path / "rtn", method="rtn", **settings)
    report = quantize(mixtures(kind), tmp_path / "gptq", method="gptq", calibration_text=texts[0], **settings)
    assert report.metrics.kl < 0.9 * rounded.metrics.kl and report.bits == rounded.bits
    assert report.errors.keys() == report.bits.keys()
    assert any("switch_mlp" in module for module in report.bits) and sum(report.rounded_experts.values()) < 4
    assert not any(module.endswith((".gate", "shared_expert_gate")) for module in report.bits)
    searched = quantize(
        mixtures(kind), tmp_path / "bits", target_bpw=5.9, group_size=32, calibration_text=texts[0], evaluate=False
    )
    assert 5.3 < searched.bits_per_weight <= 5.9 and len(set(searched.bits.values())) > 1
    assert_runs_alike(tmp_path / "gptq", 1)


# The readers of each norm or matrix whose channels AWQ can scale, in the last layer. Not among them: gpt-oss's up
# projection, to which one is added.
_QKV = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
_SHARED = "mlp.shared_expert.gate_proj mlp.shared_expert.up_proj mlp.shared_expert_gate"
_SWITCH = "mlp.switch_mlp.gate_proj mlp.switch_mlp.up_proj"
_ATTENTION = {"input_layernorm": _QKV, "self_attn.v_proj": "self_attn.o_proj"}
_DOWN = {"mlp.switch_mlp.up_proj": "mlp.switch_mlp.down_proj"}
_SHARED_DOWN = {"mlp.shared_expert.up_proj": "mlp.shared_expert.down_proj"}
SCALED = {
    "mixtral": {**_ATTENTION, **_DOWN, "post_attention_layernorm": f"mlp.gate {_SWITCH}"},
    "qwen2_moe": {**_ATTENTION, **_DOWN, **_SHARED_DOWN, "post_attention_layernorm": f"mlp.gate {_SWITCH} {_SHARED}"},
    "qwen3_next": {
        **_ATTENTION, **_DOWN, **_SHARED_DOWN, "post_attention_layernorm": f"mlp.gate {_SWITCH} {_SHARED}",
        "input_layernorm": f"{_QKV} self_attn.gate_proj",
    },
    "deepseek_v3": {
        "input_layernorm": "self_attn.q_a_proj self_attn.kv_a_proj_with_mqa",
        "self_attn.q_a_layernorm": "self_attn.q_b_proj",
        "post_attention_layernorm": f"mlp.gate {_SWITCH} mlp.shared_expert.gate_proj mlp.shared_expert.up_proj",
        **_DOWN, **_SHARED_DOWN,
    },
    "gpt_oss": {**_ATTENTION, "post_attention_layernorm": f"mlp.gate {_SWITCH}"},
    "granitemoehybrid": {
        **_ATTENTION, **_DOWN, **_SHARED_DOWN,
        "post_attention_layernorm": f"mlp.gate {_SWITCH} mlp.shared_expert.gate_proj mlp.shared_expert.up_proj",
    },
    "gemma4_text": {
        "input_layernorm": "self_attn.q_proj",  # the layer reads the keys and values of another one
        "pre_feedforward_layernorm": "mlp.gate_proj mlp.up_proj", "mlp.up_proj": "mlp.down_proj",
        "pre_feedforward_layernorm_2": "experts.switch_mlp.gate_proj experts.switch_mlp.up_proj",
        "experts.switch_mlp.up_proj": "experts.switch_mlp.down_proj",
    },
    "lfm2": {
        **_ATTENTION, "post_attention_layernorm": "mlp.gate_proj mlp.up_proj", "mlp.up_proj": "mlp.down_proj",
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALED)
def test_awq_finds_what_it_can_scale(kind, mixtures, monkeypatch):
    layers = layers_of(open_module_checkpoint(mixtures(kind)))
    tokens = mx.array(np.random.default_rng(0).integers(0, VOCABULARY, (2, 64)))
    state, output = *layers.embed([tokens]), mx.array(0.0)
    groups: list = []
    for index, _ in enumerate(layers.names):
        block, before = layers.load(index), state
        with calibrate.recording(block) as inputs:
            state = output = layers.run(block, index, 0, before)
            mx.eval(output)
        groups = find_scale_groups(block, partial(layers.run, block, index, 0, before))
    assert {g.source: " ".join(sorted(g.next_layers)) for g in groups} == {
        source: " ".join(sorted(readers.split())) for source, readers in SCALED[kind].items()
    }
    monkeypatch.setattr(awq, "EXPONENTS", (0.5,))
    formats = dict.fromkeys(inputs, Format(2, 32))
    changed = []
    for tokens in (10**6, 1):  # experts that read too little aren't scaled
        monkeypatch.setattr(calibrate, "MIN_EXPERT_TOKENS", tokens)
        changed.append(apply_best_scales(block, groups, inputs, formats, mx.float32))
    assert "switch_mlp.down_proj" not in str(changed[0])
    assert set(SCALED[kind]) == {group.source for group in groups if group.source in changed[0] | changed[1]}
    after = layers.run(block, index, 0, before)
    assert mx.abs(after - output).max() < 1e-4 * mx.abs(output).max()


@pytest.mark.parametrize("kind", ["mixtral", "lfm2"])
def test_awq_reduces_the_divergence(kind, tiny_tokenizer, tmp_path, texts):
    """In models with a few channels larger than the others, as trained ones have them."""
    source = write_mixture(tmp_path / "source", kind, tiny_tokenizer)
    large = 1 + 7 * (mx.arange(64) % 17 == 3)
    weights = load_weights(source)
    for name in (name for name, value in weights.items() if re.search(r"layers.*norm", name) and value.size == 64):
        weights[name] = (weights[name] * large).astype(weights[name].dtype)
    mx.eval(weights)
    save_weights(source, weights)
    settings = {"bits": 4, "group_size": 32, "eval_text": texts[1]}
    rounded = quantize(source, tmp_path / "rtn", method="rtn", **settings)
    report = quantize(source, tmp_path / "awq", method="awq", calibration_text=texts[0], **settings)
    assert report.metrics.kl < 0.95 * rounded.metrics.kl and report.bits == rounded.bits
    assert_runs_alike(tmp_path / "awq", 2)


def test_short_convolutions(mixtures, tmp_path, texts):
    """Their projections are calibrated, and the kernel keeps its dtype."""
    settings = {"bits": 3, "group_size": 32, "eval_text": texts[1]}
    rounded = quantize(mixtures("lfm2"), tmp_path / "rtn", method="rtn", **settings)
    assert {name for name in rounded.bits if "layers.0.conv" in name} == {
        f"model.layers.0.conv.{name}_proj" for name in ("in", "out")
    }
    for method, share in (("gptq", 0.9), ("awq", 1.1)):
        report = quantize(mixtures("lfm2"), tmp_path / method, method=method, calibration_text=texts[0], **settings)
        assert report.metrics.kl < share * rounded.metrics.kl and report.bits == rounded.bits
        assert_runs_alike(tmp_path / method, 4)


def test_report(mixtures, tmp_path, texts, plots):
    report = quantize(mixtures("granitemoe"), tmp_path / "out", method="rtn", group_size=32, eval_text=texts[1])
    assert_runs_alike(tmp_path / "out", 4)
    assert set(report.errors) == set(report.bits)
    assert report.metrics.hidden_state_errors == {} and (tmp_path / "out/quantization.png").stat().st_size > 10_000
