"""Quantized models: equal to mlx_lm's rounding, readable by mlx_lm, closer to the source with calibration."""

from dataclasses import replace

import numpy as np
import pytest

import mlxlm
from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_weights
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.config.quantization import Format
from mlxlm.convert.compare import compare
from mlxlm.quantize import METHODS as CHOICES
from mlxlm.quantize import quantize
from mlxlm.quantize.methods import METHODS, quantize_calibrated
from mlxlm.quantize.quantization_plan import matrices, uniform


@pytest.mark.parametrize(
    "settings",
    [{"bits": 4}, {"bits": 3, "group_size": 32}, {"recipe": "mixed_3_6"}],
    ids=str,
)
def test_rtn_equals_mlx_lm(model, tmp_path, settings):
    convert = pytest.importorskip("mlx_lm.convert").convert
    quantize(model, tmp_path / "ours", **settings, method="rtn", evaluate=False)
    theirs = {"q_bits": settings.get("bits"), "q_group_size": settings.get("group_size")}
    if "recipe" in settings:
        theirs = {"quant_predicate": settings["recipe"], "q_group_size": 64}
    convert(str(model), str(tmp_path / "theirs"), quantize=True, **theirs)
    assert_equal(tmp_path / "ours", tmp_path / "theirs")


def assert_equal(*folders):
    ours, theirs = map(load_weights, folders)
    assert set(ours) == set(theirs)
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype and mx.array_equal(ours[name], value), name


def test_all_registered_methods_can_be_chosen():
    assert tuple(METHODS) == CHOICES


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float32], ids=str)
def test_rtn_of_other_dtypes_equals_mlx_lm(write_model, tmp_path, dtype):
    """A float32 model becomes one of float16 first, for which mlx_lm has to be asked."""
    mlx_lm = pytest.importorskip("mlx_lm.convert")
    write_model(tmp_path / "source", dtype)
    quantize(tmp_path / "source", tmp_path / "ours", method="rtn", evaluate=False)
    asked = "float16" if dtype == mx.float32 else None
    mlx_lm.convert(str(tmp_path / "source"), str(tmp_path / "theirs"), quantize=True, dtype=asked)
    assert_equal(tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize(
    "settings", [{"method": "gptq", "bits": 3}, {"method": "awq"}, {"recipe": "mixed_2_6", "method": "gptq"}], ids=str
)
def test_mlx_lm_reads_calibrated_models(model, tmp_path, texts, settings):
    mlx_lm = pytest.importorskip("mlx_lm")
    report = quantize(model, tmp_path / "out", **settings, calibration_text=texts[0], eval_text=texts[1], verify=False)
    assert report.checks == []
    theirs, _ = mlx_lm.load(str(tmp_path / "out"))
    theirs.set_dtype(mx.float32)
    tokens = mx.array([[5, 60, 7, 200, 9, 11]])
    ours = mlxlm.load(tmp_path / "out").model
    ours.set_dtype(mx.float32)  # on a GPU it computes in float16
    assert mx.abs(theirs(tokens) - ours(tokens)).max().item() < 1e-3
    assert report.calibration_text.endswith("calibration.txt") and report.metrics.text.endswith("evaluation.txt")


def test_calibration_reduces_kl_at_equal_size(model, tmp_path, texts):
    reports = {
        method: quantize(
            model, tmp_path / method, bits=3, method=method, eval_text=texts[1],
            calibration_text=None if method == "rtn" else texts[0],
        )
        for method in ("rtn", "gptq", "awq")
    }  # fmt: skip
    kl = {method: report.metrics.kl for method, report in reports.items()}
    assert kl["gptq"] < 0.8 * kl["rtn"] and kl["awq"] < kl["rtn"]
    assert len({report.bits_per_weight for report in reports.values()}) == 1


def test_family_with_fused_matrices(write_model, tmp_path, texts):
    config = write_model(tmp_path / "source", model_type="phi3", tie_word_embeddings=False)
    report = quantize(
        tmp_path / "source", tmp_path / "out", method="gptq", calibration_text=texts[0], eval_text=texts[1]
    )
    assert "model.layers.0.self_attn.qkv_proj" in report.formats
    assert "model.layers.0.self_attn.qkv_proj.scales" in load_weights(tmp_path / "out")
    assert report.metrics.kl < 0.5 and config.model_type == "phi3"
    searched = quantize(
        tmp_path / "source", tmp_path / "searched", target_bpw=4, calibration_text=texts[0], evaluate=False
    )
    assert searched.bits_per_weight <= 4 and len({str(chosen) for chosen in searched.formats.values()}) > 1


def test_embeddings_are_read_once_per_pass(write_model, tmp_path, texts):
    """One for each pass, whatever the number of batches: nothing keeps a copy of the table."""
    write_model(tmp_path / "source", tie_word_embeddings=False)
    checkpoint = open_checkpoint(tmp_path / "source")
    reads: dict[str, int] = {}

    def counted(name, tensor):
        def count(value):
            reads[name] = reads.get(name, 0) + 1
            return value

        return tensor.transform(count)

    counting = replace(checkpoint, tensors={n: counted(n, t) for n, t in checkpoint.tensors.items()})
    ids = (np.arange(2500) % 290).tolist()
    compare(counting, checkpoint, [ids])
    assert (
        reads["model.embed_tokens.weight"] == 2 and reads["model.layers.0.mlp.up_proj.weight"] == 1
    )  # and for the head
    reads.clear()
    plan = uniform(matrices(checkpoint), Format(4))
    windows = np.array(ids, np.int32).reshape(-1, 100)
    (tmp_path / "scratch").mkdir()
    quantize_calibrated(counting, plan, METHODS["gptq"](), windows, tmp_path / "scratch")
    assert reads["model.embed_tokens.weight"] == 2 and reads["lm_head.weight"] == 1  # quantized, and run as it was
