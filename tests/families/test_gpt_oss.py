"""GPT-OSS with experts in MXFP4, as OpenAI publishes it: read as by transformers, packed and dequantized."""

import numpy as np
import pytest
from gguf import GGUFReader

from mlxlm.backend.mlx import mx, nn, tree_flatten
from mlxlm.checkpoint import load, load_model, load_weights, open_checkpoint, save_weights
from mlxlm.checkpoint.lazy_tensor import lazy_tensor
from mlxlm.checkpoint.map_weights import to_file_weights
from mlxlm.convert import convert
from mlxlm.families import weight_mappings
from mlxlm.model.experts import QuantizedSwitchLinear
from mlxlm.quantize import quantize
from mlxlm.train.step import cross_entropy_loss
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


def test_experts_stay_mxfp4_in_gguf_files(folder, tmp_path):
    """As llama.cpp's converter writes them, and from one file to another, to the byte."""
    stored = load_weights(folder)
    kinds = {"first": None, "second": "MXFP4"}
    for (name, outtype), other in zip(kinds.items(), ("BF16", "Q8_0"), strict=True):
        source = folder if name == "first" else tmp_path / "first.gguf"
        report = convert(source, tmp_path / f"{name}.gguf", outtype=outtype)
        assert report.checks[0].result == ("equal" if outtype is None else "within rounding")
        tensors = {tensor.name: tensor for tensor in GGUFReader(tmp_path / f"{name}.gguf").tensors}
        assert tensors["blk.1.attn_q.weight"].tensor_type.name == tensors["output.weight"].tensor_type.name == other
        for layer in range(2):
            path = f"model.layers.{layer}.mlp.experts"
            blocks, scales = (np.array(stored[f"{path}.gate_up_proj_{part}"]) for part in ("blocks", "scales"))
            for number, part in enumerate(("gate", "up")):  # rows of the two alternate
                written = tensors[f"blk.{layer}.ffn_{part}_exps.weight"]
                assert written.tensor_type.name == "MXFP4"
                found = np.array(written.data).reshape(*scales[:, number::2].shape, 17)
                own = blocks[:, number::2]
                values = np.stack([own & 15, own >> 4], axis=-1).reshape(*own.shape[:-1], 32)
                np.testing.assert_array_equal(found[..., 0], scales[:, number::2])
                np.testing.assert_array_equal(found[..., 1:], values[..., :16] | values[..., 16:] << 4)
    report = convert(folder, tmp_path / "bf16.gguf", outtype="BF16")
    assert report.bits_per_weight > 15.9


def test_other_experts_are_rounded_to_mxfp4(tiny_tokenizer, tmp_path):
    source = write_mixture(tmp_path / "source", "gpt_oss", tiny_tokenizer, rope_parameters=YARN)
    report = convert(source, tmp_path / "m.gguf", outtype="MXFP4")
    assert report.checks[0].detail == "rounded to MXFP4, Q8_0"
    assert any(note.startswith("kept in Q8_0:") and "only experts have 4 bits" in note for note in report.notes)


def test_folders_of_other_programs(folder, tmp_path):
    """An unquantized folder, and one of mlx_lm with experts in its own MXFP4."""
    assert "already quantized (MXFP4)" in quantize(folder, tmp_path / "4bit", method="rtn", evaluate=False).warnings[0]
    report = convert(folder, tmp_path / "same")
    assert {check.result for check in report.checks} == {"equal"} and report.dtype == "4-bit"
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


def test_gradients_are_those_of_pytorch(tmp_path, tiny_tokenizer):
    """Of sinks, routers, and experts with clamped activations; each in the layout of transformers."""
    oracle = pytest.importorskip("tests.transformers_oracle")
    torch = pytest.importorskip("torch")
    folder = write_mixture(
        tmp_path / "source", "gpt_oss", tiny_tokenizer, "float32", rope_parameters=YARN, swiglu_limit=0.5
    )
    theirs = oracle.transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    theirs.train()
    logits = theirs(torch.from_numpy(TOKENS[:, :-1])).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(TOKENS[:, 1:].flatten())).backward()
    model, config = load_model(folder)
    model.train()
    gradients = nn.value_and_grad(model, lambda *args: cross_entropy_loss(*args)[0])(model, mx.array(TOKENS))[1]
    found = {name: lazy_tensor(value) for name, value in tree_flatten(gradients)}
    stored = to_file_weights(weight_mappings(config), found)
    for name, parameter in theirs.named_parameters():
        wanted = TOKENS[:, 1:].size * parameter.grad.numpy()
        error = np.linalg.norm(np.array(stored[name].read()) - wanted) / np.linalg.norm(wanted)
        assert error < 1e-4, (name, error)
