"""GPT-OSS with experts in MXFP4, as OpenAI publishes it: read as by transformers, packed and dequantized."""

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load, load_model, load_weights, open_checkpoint, save_weights
from mlxlm.convert import convert
from mlxlm.model.experts import QuantizedSwitchLinear
from mlxlm.quantize import quantize
from mlxlm.utils.errors import CheckpointError
from tests.mixtures import VOCABULARY, write_mixture
from tests.small_models import change_config

YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, "truncate": False,
}  # fmt: skip
TOKENS = np.random.default_rng(1).integers(3, VOCABULARY, (2, 45))


@pytest.fixture
def folder(tmp_path, tiny_tokenizer):
    """A folder in the layout of openai/gpt-oss-20b, with random experts."""
    folder = write_mixture(tmp_path / "source", "gpt_oss", tiny_tokenizer, rope_parameters=YARN)
    weights, rng = load_weights(folder), np.random.default_rng(0)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = weights.pop(name).shape
        blocks = rng.integers(0, 256, (experts, outputs, inputs // 32, 16)).astype(np.uint8)
        weights[f"{name}_blocks"] = mx.array(blocks)
        weights[f"{name}_scales"] = mx.array(rng.integers(121, 125, blocks.shape[:-1]).astype(np.uint8))
    mx.eval(weights)
    save_weights(folder, weights)
    change_config(folder, quantization_config={"quant_method": "mxfp4"})
    return folder


def logits(model):
    model.set_dtype(mx.float32)
    return np.array(model(mx.array(TOKENS)))


def test_logits_are_those_of_transformers(folder, monkeypatch):
    """On a CPU, where experts are dequantized, and as on a GPU, where they are not."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    oracle = pytest.importorskip("tests.transformers_oracle")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    wanted = oracle.logits_of(theirs.eval().to(torch.float32), TOKENS)
    np.testing.assert_allclose(logits(load_model(folder)[0]), wanted, atol=1e-4 * wanted.std())
    monkeypatch.setattr(load, "ON_CPU", False)
    packed = load_model(folder)[0]
    assert isinstance(packed.layers[0].mlp.switch_mlp.gate_proj, QuantizedSwitchLinear)
    np.testing.assert_allclose(logits(packed), wanted, atol=1e-4 * wanted.std())


def test_folders_of_other_programs(folder, tmp_path):
    """An unquantized folder, and one of mlx_lm with experts in its own MXFP4."""
    with pytest.raises(CheckpointError, match="is already quantized"):
        quantize(folder, tmp_path / "4bit")
    wanted = logits(load_model(folder)[0])
    report = convert(folder, tmp_path / "plain", dtype="float32")
    assert {check.result for check in report.checks} == {"equal"} and report.bits_per_weight == 32
    np.testing.assert_array_equal(logits(load_model(tmp_path / "plain")[0]), wanted)
    mlx_lm = pytest.importorskip("mlx_lm.utils")
    change_config(folder, rope_parameters={**YARN, "truncate": True})  # mlx_lm ignores truncate
    wanted = logits(load_model(folder)[0])
    change_config(folder, quantization={"group_size": 32, "bits": 4, "mode": "mxfp4"})
    model, config = mlx_lm.load_model(folder, lazy=True)
    (tmp_path / "mlx").mkdir()
    mlx_lm.save_model(tmp_path / "mlx", model)
    mlx_lm.save_config(config, tmp_path / "mlx/config.json")
    np.testing.assert_array_equal(logits(load_model(tmp_path / "mlx")[0]), wanted)


@pytest.mark.parametrize(
    ("part", "shape", "problem"),
    [
        ("gate_up_proj_blocks", (4, 128, 2, 8), r"it must be \[experts, out, groups, 16\] bytes"),
        ("down_proj_scales", (4, 64, 1), r"down_proj_scales must be \[4, 64, 2\] bytes"),
        ("down_proj_scales", None, r"down_proj_scales must be \[4, 64, 2\] bytes"),
        ("gate_up_proj_blocks", None, "gate_proj.scales is of type U8, not floating-point"),
        ("down_proj_bias", (4, 63), "is .4, 63., the configuration says .4, 64."),
    ],
)
def test_malformed_parts(folder, part, shape, problem):
    name, weights = f"model.layers.1.mlp.experts.{part}", load_weights(folder)
    array = weights.pop(name)
    if shape is not None:
        weights[name] = mx.zeros(shape, array.dtype)
    save_weights(folder, weights)
    with pytest.raises(CheckpointError, match=problem):
        open_checkpoint(folder)
