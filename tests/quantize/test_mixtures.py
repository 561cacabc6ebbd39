"""Models of mlx_lm's classes: quantized like mlx_lm does it, and read by mlx_lm as by mlxlm."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mlxlm.backend.mlx import mx, tree_flatten
from mlxlm.checkpoint import load_model, load_weights
from mlxlm.checkpoint.load import load_checkpoint
from mlxlm.checkpoint.open import open_module_checkpoint
from mlxlm.convert import convert
from mlxlm.generation import greedy_tokens
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.quantize import methods, pipeline, quantize
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
    report = quantize(source, tmp_path / "out", group_size=32, evaluate=False)
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
        mixtures("deepseek_v3"),
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


@pytest.mark.parametrize("kind", ["deepseek_v3", "granitemoe"])
def test_calibration_reduces_the_divergence(kind, mixtures, tmp_path, texts):
    settings = {"bits": 3, "group_size": 32, "eval_text": texts[1]}
    rounded = quantize(mixtures(kind), tmp_path / "rtn", **settings)
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


def test_a_model_that_computes_something_between_its_layers_is_not_calibrated(mixtures, monkeypatch, tmp_path, texts):
    granitemoe = pytest.importorskip("mlx_lm.models.granitemoe")

    def call(self, inputs, cache=None, input_embeddings=None):
        x = self.embed_tokens(inputs)
        for layer in self.layers:
            x = 2 * layer(x, "causal", None)
        return self.norm(x)

    source = mixtures("granitemoe")
    monkeypatch.setattr(granitemoe.GraniteMoEModel, "__call__", call)
    with pytest.raises(ArgumentError, match="granitemoe models can't be calibrated: .* between its layers .try: .*rtn"):
        quantize(source, tmp_path / "out", method="gptq", calibration_text=texts[0], evaluate=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shape", [(2, 5, 1, 1, 8), (2, 5, 3, 1, 8), (30, 1, 8)], ids=str)
def test_moments_of_each_expert(shape):
    """Inputs of several experts, of one each, and sorted."""
    rng = np.random.default_rng(0)
    x, experts = rng.normal(size=shape).astype(np.float32), rng.integers(0, 4, (2, 5, 3))
    experts = experts.reshape(-1) if len(shape) == 3 else experts
    inputs = ExpertInputs()
    for _ in range(2):
        inputs.add(mx.array(x), mx.array(experts))
    rows = np.broadcast_to(x[..., 0, :], (*experts.shape, 8))
    for expert in range(5):
        chosen = np.concatenate(2 * [rows[experts == expert]])
        count, stats = inputs.of(expert)
        assert count == len(chosen)
        np.testing.assert_allclose(stats.moments, chosen.T @ chosen if count else 0, rtol=1e-4, atol=1e-5)


def test_experts_with_few_tokens_are_rounded(mixtures, tmp_path, texts, monkeypatch):
    settings = {"group_size": 32, "evaluate": False}
    quantize(mixtures("granitemoe"), tmp_path / "rtn", **settings)
    settings |= {"method": "gptq", "calibration_text": texts[0]}
    reports = [quantize(mixtures("granitemoe"), tmp_path / "gptq", **settings)]
    monkeypatch.setattr(methods, "MIN_EXPERT_TOKENS", 10**6)
    reports.append(quantize(mixtures("granitemoe"), tmp_path / "few", **settings))
    experts = "model.layers.{}.block_sparse_moe.switch_mlp.{}_proj"
    names = [experts.format(i, part) for i in (0, 1) for part in ("gate", "up", "down")]
    assert reports[0].rounded_experts == {} and reports[1].rounded_experts == dict.fromkeys(names, 4)
    calibrated, few, rounded = (load_weights(tmp_path / name) for name in ("gptq", "few", "rtn"))
    for name in (f"{name}.weight" for name in names):
        assert mx.array_equal(few[name], rounded[name]) and not mx.array_equal(calibrated[name], rounded[name])


def test_methods_that_are_not_possible(mixtures, tmp_path, texts, monkeypatch):
    source = mixtures("granitemoe")
    with pytest.raises(ArgumentError, match="awq isn't possible for granitemoe models, .* .try: rtn or gptq"):
        quantize(source, tmp_path / "out", method="awq", calibration_text=texts[0])
    monkeypatch.setattr(pipeline.platform, "total_memory", lambda: 10**6)
    with pytest.raises(CheckpointError, match="needs .* GB of memory for the two models .try: .*evaluat"):
        quantize(source, tmp_path / "out", eval_text=texts[1])


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "qwen3_next"])
def test_experts_of_the_decoder(kind, mixtures, tmp_path, texts):
    """Every method but AWQ; mlx_lm reads the results as mlxlm does."""
    settings = {"bits": 3, "group_size": 32, "eval_text": texts[1]}
    rounded = quantize(mixtures(kind), tmp_path / "rtn", **settings)
    report = quantize(mixtures(kind), tmp_path / "gptq", method="gptq", calibration_text=texts[0], **settings)
    assert report.metrics.kl < 0.9 * rounded.metrics.kl and report.bits == rounded.bits
    assert any("switch_mlp" in module for module in report.bits) and sum(report.rounded_experts.values()) < 4
    assert not any(module.endswith((".gate", "shared_expert_gate")) for module in report.bits)
    searched = quantize(
        mixtures(kind), tmp_path / "bits", target_bpw=5.9, group_size=32, calibration_text=texts[0], evaluate=False
    )
    assert 5.3 < searched.bits_per_weight <= 5.9 and len(set(searched.bits.values())) > 1
    assert_runs_alike(tmp_path / "gptq", 1)
    with pytest.raises(ArgumentError, match="awq isn't possible for .* models, which have experts .try: rtn or gptq"):
        quantize(mixtures(kind), tmp_path / "awq", method="awq", calibration_text=texts[0])


def test_short_convolutions(mixtures, tmp_path, texts):
    """Their projections are calibrated, and the kernel keeps its dtype."""
    settings = {"bits": 3, "group_size": 32, "eval_text": texts[1]}
    rounded = quantize(mixtures("lfm2"), tmp_path / "rtn", **settings)
    assert {name for name in rounded.bits if "layers.0.conv" in name} == {
        f"model.layers.0.conv.{name}_proj" for name in ("in", "out")
    }
    for method, share in (("gptq", 0.9), ("awq", 1.1)):
        report = quantize(
            mixtures("lfm2"), tmp_path / method, method=method, calibration_text=texts[0], cross_check=True, **settings
        )
        assert report.metrics.kl < share * rounded.metrics.kl and report.bits == rounded.bits
        assert report.checks[-1].name == "mlx_lm" and report.checks[-1].result == "equal"
    assert_runs_alike(tmp_path / "gptq", 4)


def test_report_and_cross_check(mixtures, tmp_path, texts, plots):
    report = quantize(mixtures("deepseek_v3"), tmp_path / "out", group_size=32, eval_text=texts[1], cross_check=True)
    assert report.checks[-1].name == "mlx_lm" and report.checks[-1].result == "equal"
    assert set(report.errors) == set(report.bits) and "model.layers.1.self_attn.embed_q" in report.errors
    assert report.metrics.hidden_state_errors == {} and (tmp_path / "out/quantization.png").stat().st_size > 10_000
