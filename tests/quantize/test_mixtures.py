"""Models of mlx_lm's classes: quantized like mlx_lm does it, and read by mlx_lm as by mlxlm."""

from __future__ import annotations

import json

import pytest

from mlxlm.backend.mlx import mx, tree_flatten
from mlxlm.checkpoint import load_model, load_weights
from mlxlm.convert import convert
from mlxlm.generation import greedy_tokens
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.quantize import quantize
from mlxlm.tokenizer import load as load_tokenizer
from tests.mixtures import KINDS, write_mixture

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


def assert_runs_alike(folder, count=16):
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


@pytest.mark.parametrize("kind", KINDS)
def test_bits_are_searched_for_a_size(kind, mixtures, tmp_path, texts):
    report = quantize(
        mixtures(kind), tmp_path / "out", target_bpw=5.6, group_size=32, calibration_text=texts[0], evaluate=False
    )
    assert 5.2 < report.bits_per_weight <= 5.6
    assert len(set(report.bits.values())) > 2
    assert_runs_alike(tmp_path / "out", 4)


def test_routers_keep_the_bits_of_the_class_in_a_search(mixtures, tmp_path, texts):
    report = quantize(mixtures("qwen3_moe"), tmp_path / "out", max_size=130_000, calibration_text=texts[0])
    assert {report.bits[f"model.layers.{i}.mlp.gate"] for i in range(2)} == {8} and report.bytes <= 130_000
    assert report.metrics.hidden_state_errors == {} and 0 < report.metrics.kl < 1


@pytest.mark.parametrize("kind", KINDS)
def test_calibration_reduces_the_divergence(kind, mixtures, tmp_path, texts):
    settings = {"bits": 3, "group_size": 32, "eval_text": texts[1]}
    rounded = quantize(mixtures(kind), tmp_path / "rtn", **settings)
    report = quantize(mixtures(kind), tmp_path / "gptq", method="gptq", calibration_text=texts[0], **settings)
    assert report.metrics.kl < 0.9 * rounded.metrics.kl and report.bits == rounded.bits
    assert set(report.errors) == set(report.bits)
    assert_runs_alike(tmp_path / "gptq", 4)
