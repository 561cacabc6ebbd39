"""Quantizing from end to end: reports, verification, and what is refused."""

from __future__ import annotations

import json
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.checkpoint import load_weights, save_weights
from mlxlm.checkpoint.huggingface import copy_tokenizer as carry
from mlxlm.checkpoint.locations import QUANTIZATION_PLOT, QUANTIZATION_REPORT
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.convert import convert
from mlxlm.quantize import quantize, report
from mlxlm.utils.errors import CheckpointError, ConfigError, DataError
from tests.quantize.conftest import needed_bytes


def test_report_agrees_with_the_files(model, tmp_path, texts, plots):
    phases = []
    settings = {"method": "rtn", "eval_text": texts[1]}
    report = quantize(model, tmp_path / "out", **settings, progress=lambda phase, done, total: phases.append(phase))
    assert report.bytes == needed_bytes(tmp_path / "out")
    stored = json.loads((tmp_path / "out" / QUANTIZATION_REPORT).read_text())
    assert stored == json.loads(json.dumps(report.to_dict()))
    assert (tmp_path / "out" / "quantization.png").read_bytes().startswith(b"\x89PNG")
    values = sum(t.nbytes for t in open_checkpoint(tmp_path / "out").tensors.values())
    assert report.bits_per_weight == pytest.approx(8 * values / report.parameters) and report.bits_per_weight > 4.5
    assert report.source_bits_per_weight == 16
    assert set(report.errors) == set(report.bits) and set(report.worst_layers()) <= set(report.errors)
    assert 0.05 < report.errors["model.layers.0.self_attn.q_proj"] < 0.2
    assert 0 < report.metrics.kl < 1 and 0.2 < report.metrics.top1_agreement <= 1
    assert {"writing", "comparing with the source"} <= set(phases)
    assert not list((tmp_path / "out").glob(".*")) and not list(tmp_path.glob(".*"))


def test_invalid_sources_and_texts(model, write_model, tmp_path, texts):
    with pytest.raises(CheckpointError, match="already exists"):
        quantize(model, model)
    write_model(tmp_path / "nan")
    weights = load_weights(tmp_path / "nan")
    broken = {name: np.nan * w if "1.mlp.up" in name else w for name, w in weights.items()}
    mx.eval(broken)
    save_weights(tmp_path / "nan", broken)
    for method in ("rtn", "gptq"):
        calibration_text = None if method == "rtn" else texts[0]
        with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj.* not finite"):
            quantize(
                tmp_path / "nan", tmp_path / "out", method=method, calibration_text=calibration_text, eval_text=texts[1]
            )
    (tmp_path / "short.txt").write_text("A cat")
    with pytest.raises(DataError, match="too few|too little"):
        quantize(model, tmp_path / "out", method="gptq", calibration_text=tmp_path / "short.txt", eval_text=texts[1])
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


def test_quantized_sources_are_dequantized_first(model, tmp_path, texts):
    """The report is about the additional loss, and its sizes are those of the files."""
    first = quantize(model, tmp_path / "8bit", bits=8, method="rtn", evaluate=False)
    report = quantize(
        tmp_path / "8bit", tmp_path / "3bit", bits=3, method="gptq", calibration_text=texts[0], eval_text=texts[1]
    )
    assert report.parameters == first.parameters and report.source_bits_per_weight == first.bits_per_weight
    assert report.metrics.kl > 0 and report.bits_per_weight < 4
    [warning] = report.warnings
    assert "already quantized (MLX): " in warning and "mlxlm convert keeps the weights" in warning
    rounded, wanted = (load_weights(tmp_path / name) for name in ("3bit", "8bit"))
    assert rounded.keys() == wanted.keys() and rounded["model.norm.weight"].dtype == mx.float16
    again = quantize(tmp_path / "8bit", tmp_path / "same", bits=8, method="rtn", eval_text=texts[1])
    assert again.metrics.kl < report.metrics.kl / 10


@pytest.mark.parametrize(
    "name, hint", [("q.gguf", "mlxlm convert SOURCE"), ("q.bin", "q, for a folder"), ("q.onnx", "q,"), ("-", "model,")]
)
def test_output_must_be_a_folder(model, tmp_path, name, hint):
    with pytest.raises(ConfigError, match=f"doesn't write files like {name}.*{hint}|standard output.*{hint}"):
        quantize(model, tmp_path / name)


def test_model_without_a_quantizable_matrix(write_model, tmp_path):
    write_model(tmp_path / "source", hidden_size=40, intermediate_size=56)
    with pytest.raises(CheckpointError, match="no matrix can be quantized: widths are 40, 56, group sizes 32, 64"):
        quantize(tmp_path / "source", tmp_path / "out", max_size=10**9)
    assert not (tmp_path / "out").exists()


def test_warnings(model, tmp_path, texts):
    gguf = tmp_path / "source.gguf"
    convert(model, gguf, outtype="Q8_0", verify_output=False)
    (tmp_path / "short.txt").write_text("The cat sat on the mat and then it ran away from the dog in the house.")
    report = quantize(gguf, tmp_path / "out", method="rtn", eval_text=tmp_path / "short.txt", verify=False)
    assert any("already quantized (Q8_0)" in warning for warning in report.warnings)
    assert any("fewer than 256 say little" in warning for warning in report.warnings)
    clean = quantize(model, tmp_path / "clean", method="rtn", eval_text=texts[1])
    assert clean.warnings == [] and clean.metrics.speed_before > 0 and clean.metrics.speed_note is None


def test_decoding_speeds(model, monkeypatch):
    source = open_checkpoint(model)
    monkeypatch.setattr(report, "SECONDS", 1.0)
    monkeypatch.setattr(report, "time", SimpleNamespace(monotonic=count(0, 0.25).__next__))
    assert report.decode_speeds(source, source, [1, 2, 3]) == (4.0, 4.0, None)
    assert "context is too short" in report.decode_speeds(source, source, [1] * 127)[2]
    monkeypatch.setattr(report.platform, "total_memory", lambda: 1000)
    assert "don't fit in memory" in report.decode_speeds(source, source, [1, 2, 3])[2]


@pytest.mark.skipif(not ON_CPU, reason="a GPU's buffers are another matter")
def test_buffer_cache_limit_is_restored(model, tmp_path):
    """MLX's cache of freed buffers stays small meanwhile, and has its own limit again afterwards."""
    limits = []

    def note(*_):
        limits.append(mx.set_cache_limit(1 << 20))
        mx.set_cache_limit(limits[-1])

    before = mx.set_cache_limit(1 << 31)
    try:
        quantize(model, tmp_path / "out", method="rtn", evaluate=False, verify=False, progress=note)
        assert max(limits) < 1 << 30 and mx.set_cache_limit(before) == 1 << 31
    finally:
        mx.set_cache_limit(before)


def test_indivisible_layers_are_skipped(write_model, tmp_path, texts):
    write_model(tmp_path / "source", hidden_size=96, intermediate_size=100)
    report = quantize(
        tmp_path / "source", tmp_path / "out", method="awq", calibration_text=texts[0], eval_text=texts[1]
    )
    assert report.skipped == {f"model.layers.{i}.mlp.down_proj": 100 for i in range(2)}
    assert report.reduced_group_sizes["model.layers.0.self_attn.q_proj"] == 32
    assert report.formats["model.layers.0.mlp.down_proj"] is None
    assert "model.layers.0.mlp.down_proj" not in report.errors


def test_verification(model, tmp_path):
    report = quantize(model, tmp_path / "out", method="rtn", evaluate=False)
    assert {check.name: check.result for check in report.checks} == dict.fromkeys(
        ("tensors", "tokenizer", "configuration"), "equal"
    )
    assert report.to_dict()["checks"][0]["name"] == "tensors"


def test_changed_values_on_disk_are_an_error(model, tmp_path, monkeypatch):
    def spoil(folder, *arguments):
        written = load_weights(folder)
        written["model.norm.weight"] = written["model.norm.weight"] + 1
        mx.eval(written)
        save_weights(folder, written)
        return []

    monkeypatch.setattr(
        "mlxlm.quantize.pipeline.copy_tokenizer", lambda source, folder: spoil(folder) or carry(source, folder)
    )
    with pytest.raises(CheckpointError, match=r"out: model.norm.weight is not what was written"):
        quantize(model, tmp_path / "out", method="rtn", evaluate=False)
    assert not list(tmp_path.iterdir())


def test_plot_of_a_family_with_other_file_names(write_model, tmp_path, plots):
    neox = {
        "model_type": "gpt_neox", "norm": "layer", "parallel_residual": True, "mlp_gated": False, "hidden_act": "gelu",
        "attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4, "partial_rotary_factor": 0.25,
        "intermediate_size": 256,
    }  # fmt: skip
    write_model(tmp_path / "source", **neox)
    report = quantize(tmp_path / "source", tmp_path / "out", evaluate=False)
    assert "model.h.0.attention.query_key_value" in report.formats
    assert (tmp_path / "out" / QUANTIZATION_PLOT).read_bytes().startswith(b"\x89PNG")
