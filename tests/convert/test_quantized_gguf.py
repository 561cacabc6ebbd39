"""Quantized GGUF files become MLX-quantized folders."""

import json

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import gguf, load_checkpoint, open_checkpoint
from mlxlm.checkpoint.gguf import affine
from mlxlm.checkpoint.gguf.header import read_header
from mlxlm.convert import convert
from mlxlm.utils.errors import CheckpointError
from tests.checkpoint.gguf.gguf_models import random_model
from tests.checkpoint.gguf.quantized_files import model_file
from tests.small_models import tensors_of

IDS = mx.array([[5, 17, 280, 33, 2, 9, 120, 44]])
EQUAL = dict.fromkeys(("tensors", "tokenizer", "configuration", "logits"), "equal")
NOTE = "the matrices stay quantized, in MLX's format, which transformers doesn't read"


def results(report) -> dict[str, str]:
    return {check.name: check.result for check in report.checks}


def dequantized_logits(path) -> np.ndarray:
    checkpoint = open_checkpoint(path)
    return np.array(load_checkpoint(checkpoint.with_tensors(checkpoint.tensors, checkpoint.quantization))[0](IDS))


def mlx_lm_logits(folder) -> np.ndarray:
    mlx_lm = pytest.importorskip("mlx_lm")
    return np.array(mlx_lm.utils.load_model(folder)[0](IDS))


def assert_close(logits, expected, error=1e-5):
    np.testing.assert_allclose(logits, expected, rtol=0, atol=error * np.abs(expected).max())


@pytest.mark.parametrize("kind", affine.EXACT_BITS)
def test_mlx_lm_runs_the_folder_of_each_exact_type(tiny_tokenizer, tmp_path, kind):
    model_file(tmp_path / "m.gguf", tiny_tokenizer, lambda name: kind, tie_word_embeddings=True)
    report = convert(tmp_path / "m.gguf", tmp_path / "out")
    assert results(report) == EQUAL and report.dtype == f"{affine.EXACT_BITS[kind]}-bit"
    assert report.notes == [NOTE] and report.warnings == []
    assert affine.EXACT_BITS[kind] + 2 <= report.bits_per_weight < affine.EXACT_BITS[kind] + 2.5
    assert_close(mlx_lm_logits(tmp_path / "out"), dequantized_logits(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    "name", ["llama-biases", "gemma2", "phi3", "gpt2", "bloom", "gpt-neox", "falcon-7b", "qwen3-moe"]
)
def test_families_whose_rows_or_names_differ(tiny_tokenizer, tmp_path, name):
    model = random_model(name, tiny_tokenizer)
    gguf.write(tmp_path / "m.gguf", model.config, tensors_of(model), tiny_tokenizer, "Q4_0")
    report = convert(tmp_path / "m.gguf", tmp_path / "out")
    assert results(report) == EQUAL and report.dtype == "4-bit, 8-bit" and report.notes == [NOTE]
    expected = dequantized_logits(tmp_path / "m.gguf")
    assert_close(dequantized_logits(tmp_path / "out"), expected)
    if name not in ("bloom", "falcon-7b", "gpt-neox"):  # it lacks two, and reads no intermediate_size of the third
        assert_close(mlx_lm_logits(tmp_path / "out"), expected, 1e-4)


def test_other_types_are_rounded_and_named(tiny_tokenizer, tmp_path):
    def kind_of(name):
        return "Q8_0" if name == "output.weight" else "Q6_K" if "ffn_down" in name or "attn_v" in name else "Q4_K"

    model_file(tmp_path / "m.gguf", tiny_tokenizer, kind_of)
    report = convert(tmp_path / "m.gguf", tmp_path / "out")
    rounding = dict.fromkeys(("tensors", "logits"), "within rounding")
    assert results(report) == {**EQUAL, **rounding}
    assert report.checks[0].detail == "rounded to 8 bits" and report.dtype == "4-bit, 8-bit"
    rounded = "model.layers.*.mlp.down_proj, model.layers.*.self_attn.v_proj"
    assert report.notes[0] == NOTE and sorted(report.notes[1].split(": ")[1].split(", ")) == sorted(rounded.split(", "))
    assert report.notes[1].startswith("rounded from Q6_K to 8 bits: ") and len(report.notes) == 2
    written = json.loads((tmp_path / "out/config.json").read_text())["quantization"]
    assert (written["bits"], written["group_size"], written["lm_head"]["bits"]) == (4, 32, 8)
    assert_close(mlx_lm_logits(tmp_path / "out"), dequantized_logits(tmp_path / "m.gguf"), 0.05)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K"])
def test_wrong_integers_are_found(tiny_tokenizer, tmp_path, monkeypatch, kind):
    model_file(tmp_path / "m.gguf", tiny_tokenizer, lambda name: kind)
    pack = affine.pack

    def wrong(info):
        weight, *rest = pack(info)
        weight[3, 5] = weight[3, 6]
        return weight, *rest

    monkeypatch.setattr(affine, "pack", wrong)
    with pytest.raises(CheckpointError, match=r"out: .*weight differs from .*m.gguf"):
        convert(tmp_path / "m.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_scales_that_are_not_finite_are_errors(tiny_tokenizer, tmp_path):
    model_file(tmp_path / "m.gguf", tiny_tokenizer, lambda name: "Q6_K" if "ffn_up" in name else "Q8_0")
    content = (tmp_path / "m.gguf").read_bytes()
    for name, offset in (("blk.1.ffn_up.weight", 208), ("blk.0.attn_q.weight", 0)):
        damaged, at = bytearray(content), read_header(tmp_path / "m.gguf").tensors[name].offset + offset
        damaged[at : at + 2] = np.array([np.inf], np.float16).tobytes()
        (tmp_path / "damaged.gguf").write_bytes(damaged)
        with pytest.raises(CheckpointError, match="has values that are not finite"):
            convert(tmp_path / "damaged.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
