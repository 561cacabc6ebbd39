"""Models of mlx_lm's classes, converted to folders of mlx_lm: the same model for transformers, mlxlm and mlx_lm."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_model, load_weights
from mlxlm.convert import convert
from mlxlm.quantize import quantize
from mlxlm.utils.errors import CheckpointError
from tests.mixtures import write_mixture
from tests.small_models import change_config

mlx_lm = pytest.importorskip("mlx_lm.utils", reason="the oracle is mlx_lm")

TOKENS = mx.array([[5, 60, 7, 200, 9, 11, 33, 250]])


def float32_logits(model):
    model.set_dtype(mx.float32)
    return np.array(model(TOKENS))


@pytest.mark.parametrize("kind", ["granitemoe", "olmo_hybrid"])
def test_converted_models_are_equal_and_read_by_mlx_lm(kind, tmp_path, tiny_tokenizer):
    source = write_mixture(tmp_path / "source", kind, tiny_tokenizer, "float32")
    report = convert(source, tmp_path / "out")
    assert {check.name: check.result for check in report.checks} == dict.fromkeys(
        ("tensors", "tokenizer", "configuration", "logits"), "equal"
    )
    assert report.dtype == "float32" and report.warnings == []
    theirs, _ = mlx_lm.load_model(tmp_path / "out", lazy=True)
    wanted = float32_logits(load_model(source)[0])
    for found in (theirs, load_model(tmp_path / "out")[0]):
        np.testing.assert_allclose(float32_logits(found), wanted, atol=1e-4)
    again = convert(tmp_path / "out", tmp_path / "again")
    assert {check.result for check in again.checks} == {"equal"}
    assert (tmp_path / "again/model.safetensors").read_bytes() == (tmp_path / "out/model.safetensors").read_bytes()


FLOAT32 = {
    ("exaone_moe", "bfloat16"): {f"model.layers.{i}.mlp.gate.e_score_correction_bias" for i in (1, 2, 3)},
    ("qwen3_5_moe_text", "float16"): {"model.layers.0.linear_attn.A_log"},
}


@pytest.mark.parametrize(("kind", "dtype"), FLOAT32)
def test_dtypes_and_what_stays_in_float32(kind, dtype, tmp_path, tiny_tokenizer):
    source = write_mixture(tmp_path / "source", kind, tiny_tokenizer, "float32")
    report = convert(source, tmp_path / "out", dtype=dtype)
    checks = {check.name: check for check in report.checks}
    assert (
        checks["tensors"].detail == f"rounded to {'BF16' if dtype == 'bfloat16' else 'F16'}"
        and checks["logits"].result == "within rounding"
    )
    dtypes = {name: value.dtype for name, value in load_weights(tmp_path / "out").items()}
    kept = {name for name, dtype in dtypes.items() if dtype == mx.float32}
    assert kept == FLOAT32[kind, dtype]
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == dtype


def test_quantized_experts_stay_quantized_or_are_dequantized(tmp_path, tiny_tokenizer):
    source = write_mixture(tmp_path / "source", "granitemoe", tiny_tokenizer)
    quantize(source, tmp_path / "4bit", group_size=32, method="rtn", evaluate=False)
    report = convert(tmp_path / "4bit", tmp_path / "same")
    assert report.dtype == "4-bit, 8-bit" and {check.result for check in report.checks} == {"equal"}
    assert (tmp_path / "same/model.safetensors").read_bytes() == (tmp_path / "4bit/model.safetensors").read_bytes()
    report = convert(tmp_path / "4bit", tmp_path / "out", dtype="bfloat16")
    assert report.dtype == "bfloat16" and report.bits_per_weight == 16
    found, wanted = (float32_logits(load_model(tmp_path / name)[0]) for name in ("out", "4bit"))
    assert np.abs(found - wanted).max() < 0.05 * wanted.std()


@pytest.mark.parametrize("name", ["model.gguf", "model.bin"])
def test_other_formats_are_for_models_of_the_decoder(name, tmp_path, tiny_tokenizer):
    source = write_mixture(tmp_path / "source", "granitemoe", tiny_tokenizer)
    with pytest.raises(CheckpointError, match="a granitemoe model can only be written to a folder .try: --out"):
        convert(source, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_foreign_quantization_is_refused(tmp_path, tiny_tokenizer):
    source = write_mixture(tmp_path / "source", "granitemoe", tiny_tokenizer)
    change_config(source, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(CheckpointError, match="was quantized by awq, and can only be run .try: its unquantized"):
        convert(source, tmp_path / "out")
