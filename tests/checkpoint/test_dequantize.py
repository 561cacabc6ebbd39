"""Folders quantized by MLX: every mode, overrides by layer, and parts that don't belong together."""

import json

import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxlm.backend.cpu_extension import Extension
from mlxlm.backend.mlx import ON_CPU, mx, nn
from mlxlm.checkpoint import load, load_checkpoint, load_model, load_submodule, open_checkpoint, save_weights
from mlxlm.checkpoint.dequantize import dequantize_tensors
from mlxlm.config import ModelConfig
from mlxlm.config.quantization import module_quantization
from mlxlm.families import config_to_hf
from mlxlm.generation import greedy_tokens
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.kernels import quantized_matmul
from mlxlm.model import Block, Decoder
from mlxlm.utils.errors import CheckpointError, MlxlmError

CONFIG = ModelConfig(
    hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
    vocab_size=64, tie_word_embeddings=True,
)  # fmt: skip
MODES = [("affine", g, b) for g in (32, 64, 128) for b in (2, 3, 4, 5, 6, 8)]
MODES += [("mxfp4", 32, 4), ("mxfp8", 32, 8), ("nvfp4", 16, 4)]


def quantized_folder(folder, plan, skipped=(), config=CONFIG):
    """Write a folder as mlx_lm.convert does; return the dequantized decoder."""
    model = Decoder(config)
    model.init_weights(0)
    weights, plain = {}, []
    for name, value in tree_flatten(model.parameters()):
        layer = name.removesuffix(".weight")
        value = value.astype(mx.bfloat16)
        entry = plan.get(layer, True)
        if value.ndim != 2 or entry is False or layer in skipped:
            weights[name] = value
            plain.append((name, value.astype(mx.float32)))
            continue
        entry = plan if entry is True else entry
        settings = {"group_size": entry["group_size"], "bits": entry["bits"], "mode": entry.get("mode") or "affine"}
        packed, *parts = mx.quantize(value, **settings)
        weights |= {f"{layer}.{part}": v for part, v in zip(("scales", "biases"), parts, strict=False)}
        weights[name] = packed
        if settings["mode"] == "affine":
            parts = [part.astype(mx.float32) for part in parts]
        plain.append((name, mx.dequantize(packed, *parts, **settings).astype(mx.float32)))
    model.load_weights(plain)
    (folder / "config.json").write_text(json.dumps({**config_to_hf(config), "quantization": plan}))
    save_weights(folder, weights)
    return model


def logits(model, tokens) -> np.ndarray:
    model.set_dtype(mx.float32)  # on a GPU it is loaded as bfloat16
    return np.array(model(tokens))


@pytest.mark.parametrize(("mode", "group_size", "bits"), MODES)
def test_every_mode_equals_mx_dequantize(tmp_path, mode, group_size, bits):
    expected_model = quantized_folder(tmp_path, {"group_size": group_size, "bits": bits, "mode": mode})
    checkpoint = open_checkpoint(tmp_path)
    plain = dequantize_tensors(checkpoint.tensors, checkpoint.config.quantization)
    for name, value in tree_flatten(expected_model.parameters()):
        assert plain[name].shape == value.shape and mx.array_equal(plain[name].read().astype(mx.float32), value), name
    tokens = mx.array([[1, 2, 3]])
    close = (1e-6 if mode == "affine" else 0) if ON_CPU else 1e-4
    model = load_checkpoint(checkpoint)[0]
    np.testing.assert_allclose(logits(model, tokens), logits(expected_model, tokens), atol=close)


def test_settings_by_layer(tmp_path):
    plan = {
        "group_size": 64, "bits": 4,
        "model.embed_tokens": {"group_size": 32, "bits": 8},
        "model.layers.0.mlp.down_proj": {"group_size": 32, "bits": 4, "mode": "mxfp4"},
        "model.layers.0.mlp.up_proj": {"group_size": None, "bits": 2, "mode": "affine"},  # mlx_lm.convert, mixed_2_6
        "model.layers.1.mlp.down_proj": False,
        "model.layers.1.mlp.up_proj": True,
    }  # fmt: skip
    expected_model = quantized_folder(tmp_path, plan, skipped=["model.layers.0.self_attn.q_proj"])
    model, _ = load_model(tmp_path)
    tokens = mx.array([[5, 6]])
    close = 1e-6 if ON_CPU else 1e-4
    np.testing.assert_allclose(logits(model, tokens), logits(expected_model, tokens), atol=close)


def test_quantization_config_is_also_read(tmp_path):
    quantized_folder(tmp_path, {"group_size": 64, "bits": 4})
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"] = values.pop("quantization")
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert open_checkpoint(tmp_path).config.quantization["bits"] == 4


def test_other_keys_are_ignored(tmp_path):
    quantized_folder(tmp_path, {"group_size": 64, "bits": 4, "quant_method": "mlx", "mode": None, "note": None})
    assert module_quantization(open_checkpoint(tmp_path).config.quantization, "lm_head")["mode"] == "affine"


def set_memory(monkeypatch, total):
    """Simulate a machine with `total` bytes and without a GPU."""
    monkeypatch.setattr(load, "ON_CPU", True)
    monkeypatch.setattr(load.platform, "total_memory", lambda: total)


def is_quantized(module):
    return isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding)


@pytest.mark.parametrize("place", ["a GPU", "a processor without room"])
@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
def test_model_stays_quantized(tmp_path, monkeypatch, place, mode):
    plan = {"group_size": 32, "bits": 4, "mode": mode, "model.layers.1.mlp.down_proj": False}
    expected_model = quantized_folder(tmp_path, plan)
    checkpoint = open_checkpoint(tmp_path)
    stored = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    if place == "a GPU":
        monkeypatch.setattr(load, "ON_CPU", False)
        model, _ = load_checkpoint(checkpoint)
    else:
        set_memory(monkeypatch, 1.2 * stored)
        with pytest.warns(UserWarning, match="GB on a CPU, this machine has .*: it keeps its dtype, which is slow"):
            model, _ = load_checkpoint(checkpoint)
    first, last = model.layers
    assert is_quantized(first.mlp.down_proj) and is_quantized(last.self_attn.q_proj)
    assert is_quantized(model.model.embed_tokens) and not is_quantized(last.mlp.down_proj)
    assert (first.mlp.up_proj.bits, first.mlp.up_proj.group_size, first.mlp.up_proj.mode) == (4, 32, mode)
    assert first.input_layernorm.weight.dtype == (mx.bfloat16 if place == "a GPU" else mx.float32)
    tokens = mx.array([[1, 2, 3]])
    # In 16 bits each product is rounded; in float32 only the order of sums is another.
    close = 0.1 if place == "a GPU" else 1e-3
    np.testing.assert_allclose(np.array(model(tokens).astype(mx.float32)), np.array(expected_model(tokens)), atol=close)


def test_layer_stays_quantized(tmp_path, monkeypatch):
    expected_model = quantized_folder(tmp_path, {"group_size": 64, "bits": 4})
    checkpoint = open_checkpoint(tmp_path)
    monkeypatch.setattr(load, "ON_CPU", False)
    block = Block(checkpoint.config, 1)
    load_submodule(block, checkpoint.tensors, "model.layers.1", checkpoint.config.quantization)
    assert is_quantized(block.self_attn.o_proj) and block.self_attn.o_proj.bits == 4
    layer = block.self_attn.o_proj
    parts = (part.astype(mx.float32) for part in (layer.scales, layer.biases))
    dequantized = mx.dequantize(layer.weight, *parts, group_size=64, bits=4)
    assert mx.array_equal(dequantized, expected_model.layers[1].self_attn.o_proj.weight)


@pytest.mark.skipif(not ON_CPU, reason="a GPU multiplies all formats")
def test_without_a_compiler_weights_are_dequantized(tmp_path, monkeypatch):
    expected_model = quantized_folder(tmp_path, {"group_size": 32, "bits": 4})
    for module in (load, quantized_matmul):
        monkeypatch.setattr(module, "load_extension", lambda: Extension(None, "there is no g++"))
    with pytest.warns(UserWarning, match="quantized weights are dequantized, .* more memory: there is no g.."):
        model, _ = load_checkpoint(open_checkpoint(tmp_path))
    assert not any(map(is_quantized, model.modules()))
    np.testing.assert_array_equal(logits(model, mx.array([[1, 2]])), logits(expected_model, mx.array([[1, 2]])))


def test_weights_that_do_not_fit_in_float32_keep_their_dtype(tmp_path, monkeypatch):
    model = Decoder(CONFIG)
    model.init_weights(0)
    weights = {name: value.astype(mx.bfloat16) for name, value in tree_flatten(model.parameters())}
    save_weights(tmp_path, weights)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(CONFIG)))
    stored = 2 * CONFIG.parameter_count()
    set_memory(monkeypatch, 10 * stored)
    assert load_model(tmp_path)[0].model.norm.weight.dtype == mx.float32
    set_memory(monkeypatch, int(1.5 * stored))
    with pytest.warns(UserWarning, match="try: mlxlm quantize"):
        loaded, _ = load_model(tmp_path)
    assert {value.dtype for _, value in tree_flatten(loaded.parameters())} == {mx.bfloat16}
    tokens = mx.array([[1, 2, 3]])
    np.testing.assert_allclose(np.array(loaded(tokens).astype(mx.float32)), np.array(model(tokens)), atol=3e-2)
    text = list(greedy_tokens(DecodeStep(loaded), [1, 2, 3], 3))
    assert len(text) == 3
    set_memory(monkeypatch, stored)
    with pytest.raises(CheckpointError, match=r"weights take .* GB, this machine has .* GB .try: mlxlm quantize"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("plan", "change", "expected"),
    [
        ({"group_size": 64, "bits": 8}, {}, "does not have 8 bits in groups of 64"),
        ({"group_size": 32, "bits": 4}, {}, "does not have 4 bits in groups of 32"),
        ({"group_size": 32, "bits": 4, "mode": "mxfp4"}, {}, r"\(mxfp4\) needs weight and scales, each"),
        ({"group_size": 64, "bits": 4, "lm_head": {"bits": 7, "group_size": 64}}, {}, "bits is 7"),
        ({"group_size": 64, "bits": 4, "mode": "int9"}, {}, "mode is 'int9'"),
        ({"group_size": 64, "bits": 4, "lm_head": "x"}, {}, "quantization of lm_head is 'x'"),
        ({"group_size": 64, "bits": 4, "model.layers.0.mlp.up_proj": False}, {}, "up_proj has scales"),
        (None, {"scales": None}, "needs weight, scales and biases|is of type uint32|is of type U32"),
        (None, {"biases": None}, "needs weight, scales and biases"),
        (None, {"scales": mx.zeros((128, 2), mx.uint8)}, "does not have 4 bits"),
        (None, {"weight": mx.zeros((128, 16), mx.int32)}, "does not have 4 bits"),
        (None, {"scales": mx.zeros((2,))}, "each with two or three dimensions"),
    ],
)
def test_mismatched_parts_are_errors(tmp_path, plan, change, expected):
    quantized_folder(tmp_path, {"group_size": 64, "bits": 4})
    folder = tmp_path / "changed"
    folder.mkdir()
    weights = mx.load(str(tmp_path / "model.safetensors"))
    layer = "model.layers.0.mlp.up_proj"
    for part, value in change.items():
        weights[f"{layer}.{part}"] = value
        if value is None:
            del weights[f"{layer}.{part}"]
    save_weights(folder, weights)
    values = {**config_to_hf(CONFIG), "quantization": plan or {"group_size": 64, "bits": 4}}
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(MlxlmError, match=expected) as caught:
        open_checkpoint(folder)
    assert str(folder) in str(caught.value)
