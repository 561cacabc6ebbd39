"""Weights that other programs quantized are what those programs compute from them."""

from __future__ import annotations

import functools
import json
import re

import numpy as np
import pytest

from mlxlm.backend.mlx import mx, nn
from mlxlm.checkpoint import Checkpoint, load, load_model, open_checkpoint, quantized_formats
from mlxlm.checkpoint.lazy_tensor import lazy_tensor
from mlxlm.checkpoint.map_weights import to_decoder_weights, to_file_weights
from mlxlm.config import ModelConfig
from mlxlm.convert import inspect
from mlxlm.convert.compare import dequantized_tensors
from mlxlm.families import config_to_hf, weight_mappings
from mlxlm.utils.errors import CheckpointError
from tests.checkpoint.packed_weights import (
    awq,
    compressed,
    fp8,
    gptq,
    int8,
    llm_int8,
    nf4,
    pack_model,
)  # fmt: skip
from tests.checkpoint.raw_files import header_file
from tests.small_models import arrays_of, random_decoder

CONFIG = ModelConfig(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96,
    vocab_size=97, max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}
INT, FLOAT = PACKED | {"format": "int-quantized"}, PACKED | {"format": "float-quantized"}
FP8 = {"quant_method": "fp8", "weight_block_size": [48, 48]}
BLOCKS = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"block_structure": [48, 48]}}}}
BNB, AWQ = {"quant_method": "bitsandbytes"}, {"quant_method": "awq", "bits": 4}
V1, V2 = {"quant_method": "gptq", "bits": 4}, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}
AUTO_ROUND = {"quant_method": "auto-round", "bits": 4}
FORMATS = {
    "gptq": (V1, gptq),
    "gptq-v2": (V2, functools.partial(gptq, v2=True)),
    "gptq-3bit": ({**V1, "bits": 3}, functools.partial(gptq, bits=3)),
    "gptq-3bit-act-order": ({**V1, "bits": 3}, functools.partial(gptq, bits=3, act_order=True)),
    "auto-round-gptq": (AUTO_ROUND | {"packing_format": "auto_round:auto_gptq"}, gptq),
    "auto-round-3bit": (AUTO_ROUND | {"bits": 3}, functools.partial(gptq, bits=3)),
    "auto-round": (AUTO_ROUND | {"packing_format": "auto_round"}, functools.partial(gptq, v2=True)),
    "auto-round-awq": (AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}, awq),
    "gptq-2bit": ({**V1, "bits": 2}, functools.partial(gptq, bits=2)),
    "gptq-8bit": ({**V1, "bits": 8}, functools.partial(gptq, bits=8, group=16)),
    "gptq-act-order": (V1, functools.partial(gptq, act_order=True)),
    "awq": (AWQ, awq),
    "packed-4bit": (PACKED, compressed),
    "packed-8bit-channel": (PACKED, functools.partial(compressed, bits=8, group=None)),
    "packed-asymmetric": (PACKED, functools.partial(compressed, symmetric=False)),
    "packed-act-order": (PACKED, functools.partial(compressed, symmetric=False, act_order=True)),
    "int8": (INT, int8),
    "int8-asymmetric": (INT, functools.partial(int8, symmetric=False)),
    "float-tensor": (FLOAT, functools.partial(fp8, kind="tensor", name="weight_scale")),
    "float-channel": (FLOAT, functools.partial(fp8, kind="channel", name="weight_scale")),
    "float-block": (FLOAT | BLOCKS, functools.partial(fp8, name="weight_scale")),
    "fp8": (FP8, fp8),
    "fp8-e8m0": (FP8, functools.partial(fp8, kind="e8m0")),
    "fp8-tensor": ({"quant_method": "fp8"}, functools.partial(fp8, kind="tensor")),
    "fbgemm-fp8": ({"quant_method": "fbgemm_fp8"}, functools.partial(fp8, kind="channel", name="weight_scale")),
    "nf4": (BNB, nf4),
    "nf4-nested": (BNB, functools.partial(nf4, nested=True)),
    "nf4-odd-blocks": (BNB, functools.partial(nf4, nested=True, block=100)),
    "llm-int8": (BNB, llm_int8),
}  # fmt: skip
AFFINE = {
    "gptq", "gptq-v2", "gptq-2bit", "gptq-3bit", "awq", "packed-4bit", "packed-8bit-channel", "packed-asymmetric",
    "auto-round-gptq", "auto-round-3bit", "auto-round", "auto-round-awq",
}  # fmt: skip
TOKENS = mx.array([[1, 2, 3, 4, 90]])


def write(folder, stored, settings, **values):
    """Write a folder whose 8-bit unsigned weights and scales are floats if `settings` are of FP8."""
    is_fp8 = "fp8" in settings["quant_method"] or settings.get("format") == "float-quantized"
    header, data = {}, b""
    for name, array in stored.items():
        dtype = {"f": "F", "i": "I", "u": "U"}[array.dtype.kind] + str(array.dtype.itemsize * 8)
        if is_fp8 and dtype == "U8":
            dtype = "F8_E4M3" if name.endswith(".weight") else "F8_E8M0"
        raw = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    header_file(folder / "model.safetensors", header, data)
    content = {**config_to_hf(CONFIG), "quantization_config": settings, **values}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def check_logits(folder, values):
    model = random_decoder(CONFIG)
    model.load_weights([(name, mx.array(value.astype(np.float32))) for name, value in values.items()])
    logits = np.array(load_model(folder)[0](TOKENS))
    np.testing.assert_allclose(logits, np.array(model(TOKENS)), rtol=1e-4, atol=1e-5)


def matrix(folder, stored, settings, name="model.layers.0.mlp.up_proj"):
    """Open a folder and read one weight."""
    return np.array(dequantized_tensors(open_checkpoint(write(folder, stored, settings)))[f"{name}.weight"].read())


@pytest.mark.parametrize("name", FORMATS)
def test_model_has_the_dequantized_weights(tmp_path, name):
    settings, make = FORMATS[name]
    stored, values = pack_model(arrays_of(random_decoder(CONFIG)), make)
    checkpoint = open_checkpoint(write(tmp_path, stored, settings))
    assert isinstance(checkpoint, Checkpoint)
    assert (checkpoint.config.quantization is not None) == (name in AFFINE)
    tensors = dequantized_tensors(checkpoint)
    assert tensors.keys() == values.keys()
    for tensor, expected in values.items():
        read = tensors[tensor].read()
        assert tuple(read.shape) == tensors[tensor].shape == expected.shape
        np.testing.assert_allclose(np.array(read), expected, rtol=1e-6, atol=1e-7, err_msg=tensor)
    check_logits(tmp_path, values)
    assert sum(t.nbytes for t in checkpoint.tensors.values()) == sum(a.nbytes for a in stored.values())


def test_awq_is_what_mlx_lm_reads(tmp_path):
    """Bit for bit, with mlx_lm's rounding of the biases to the dtype of the scales."""
    utils = pytest.importorskip("mlx_lm.utils")
    stored, _ = pack_model(arrays_of(random_decoder(CONFIG)), awq)
    tensors = open_checkpoint(write(tmp_path, stored, AWQ)).tensors
    for module in (name.removesuffix(".qweight") for name in stored if name.endswith(".qweight")):
        parts = {name: mx.array(value) for name, value in stored.items() if name.startswith(f"{module}.")}
        for name, expected in utils._transform_awq_weights(parts, {"group_size": 32})[0].items():
            assert mx.array_equal(tensors[name].read().astype(expected.dtype), expected), name


@pytest.mark.parametrize("kind", ["block", "tensor"])
def test_fp8_is_what_transformers_reads(tmp_path, kind):
    torch = pytest.importorskip("torch")
    fp8_module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    make = functools.partial(fp8, kind=kind, block=32)
    stored, _ = pack_model(arrays_of(random_decoder(CONFIG)), make)
    name = "model.layers.0.mlp.up_proj"
    weight = torch.from_numpy(stored[f"{name}.weight"]).view(torch.float8_e4m3fn)
    scales = torch.from_numpy(np.array(stored[f"{name}.weight_scale_inv"]))
    expected = fp8_module.Fp8Dequantize(None)._dequantize_one(weight, scales, torch.float32)
    np.testing.assert_array_equal(matrix(tmp_path, stored, FP8 | {"weight_block_size": [32, 32]}), expected.numpy())


def test_zero_points_that_wrap_around_in_the_first_gptq_format(tmp_path):
    """GPTQModel subtracts one from each zero point by a subtraction from the whole word, which may borrow."""
    parts, _ = gptq((96, 64), v2=True)
    zeros = np.random.default_rng(1).integers(0, 16, (2, 96))
    words = sum(zeros[:, i::8].astype(np.uint32) << np.uint32(4 * i) for i in range(8))
    stored, _ = pack_model(arrays_of(random_decoder(CONFIG)), gptq)
    name = "model.layers.0.mlp.up_proj"
    read = []
    for folder, settings, offset in (("v1", V1, 0x11111111), ("v2", V2, 0)):
        parts["qzeros"] = (words - np.uint32(offset)).view(np.int32)
        (tmp_path / folder).mkdir()
        own = stored | {f"{name}.{part}": value for part, value in parts.items()}
        read.append(matrix(tmp_path / folder, own, settings))
    np.testing.assert_array_equal(*read)


def test_3bit_zero_points_of_gptqmodel(tmp_path):
    """It subtracts constants from whole words, and two of the three are the wrong way round."""
    parts, values = gptq((96, 64), bits=3, v2=True)
    offsets = np.tile(np.array([0x24924924, 0x92492492, 0x49249249], np.uint32), 3)
    parts["qzeros"] = (parts["qzeros"].view(np.uint32) - offsets).view(np.int32)
    stored, _ = pack_model(arrays_of(random_decoder(CONFIG)), functools.partial(gptq, bits=3))
    stored |= {f"{UP}.{part}": value for part, value in parts.items()}
    settings = {**V1, "bits": 3, "meta": {"quantizer": ["gptqmodel:4.2.5"]}}
    np.testing.assert_allclose(matrix(tmp_path, stored, settings), values, rtol=1e-6)


def test_biases_of_zeros(tmp_path):
    """AutoGPTQ writes biases of zeros for models without biases; others are an error."""
    stored, values = pack_model(arrays_of(random_decoder(CONFIG)), gptq)
    name = "model.layers.1.self_attn.o_proj.bias"
    stored[name] = np.zeros(64, np.float16)
    assert dequantized_tensors(open_checkpoint(write(tmp_path, stored, V1))).keys() == values.keys()
    stored[name][3] = 1
    with pytest.raises(CheckpointError, match=f"{name} is not part of this model"):
        open_checkpoint(write(tmp_path, stored, V1))


@pytest.mark.parametrize("layout", ["model.language_model.", "language_model.model."])
@pytest.mark.parametrize("name", ["gptq", "fp8"])
def test_language_model_of_a_model_with_images(tmp_path, name, layout):
    settings, make = FORMATS[name]
    stored, values = pack_model(arrays_of(random_decoder(CONFIG)), make)
    stored = {layout + tensor.removeprefix("model."): value for tensor, value in stored.items()}
    stored["model.vision_tower.x.weight"] = np.zeros((2, 2), np.float32)
    write(tmp_path, stored, settings, model_type="mistral3", text_config=config_to_hf(CONFIG))
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(checkpoint, Checkpoint)
    check_logits(tmp_path, values)
    settings = {"quant_method": "torchao"}
    write(tmp_path, stored, settings, model_type="mistral3", text_config=config_to_hf(CONFIG))
    with pytest.raises(CheckpointError, match="torchao"):
        load_model(tmp_path)


@pytest.mark.parametrize("expected", [mx.float16, mx.bfloat16])
def test_on_a_gpu_weights_have_the_dtype_of_the_others(monkeypatch, expected):
    stored, values = pack_model(arrays_of(random_decoder(CONFIG)), functools.partial(gptq, act_order=True))
    others = {name: lazy_tensor(mx.array(value).astype(expected)) for name, value in stored.items() if name in values}
    packed = {name: lazy_tensor(mx.array(value)) for name, value in stored.items() if name not in values}
    monkeypatch.setattr(quantized_formats, "ON_CPU", False)
    tensors, formats = quantized_formats.read_quantized(others | packed, V1, "here")
    weight = tensors[f"{UP}.weight"]
    assert not formats and weight.dtype == weight.read().dtype == expected
    assert mx.array_equal(weight.read(), mx.array(values[f"{UP}.weight"].astype(np.float32)).astype(expected))


@pytest.mark.parametrize("name", sorted(AFFINE))
def test_integers_stay_packed_on_a_gpu(tmp_path, monkeypatch, name):
    settings, make = FORMATS[name]
    stored, values = pack_model(arrays_of(random_decoder(CONFIG)), make)
    monkeypatch.setattr(load, "ON_CPU", False)
    model, _ = load_model(write(tmp_path, stored, settings))
    layer = model.model.layers[0].mlp.up_proj
    assert isinstance(layer, nn.QuantizedLinear) and layer.weight.dtype == mx.uint32
    assert layer.scales.dtype == layer.biases.dtype == mx.float32
    halves = {name: a.astype(np.float16) if a.dtype == np.float32 else a for name, a in stored.items()}
    (tmp_path / "half").mkdir()
    half = load_model(write(tmp_path / "half", halves, settings))[0].model.layers[0].mlp.up_proj
    assert half.weight.dtype == mx.uint32 and half.scales.dtype == half.biases.dtype == mx.float16
    reference = random_decoder(CONFIG)
    reference.load_weights([(name, mx.array(value.astype(np.float32))) for name, value in values.items()])
    np.testing.assert_allclose(np.array(model(TOKENS)), np.array(reference(TOKENS)), rtol=1e-4, atol=1e-4)


def test_modules_of_several_formats(tmp_path):
    """Some modules of 8 bits, some with groups that MLX lacks."""
    makes = {"up_proj": functools.partial(compressed, bits=8), "o_proj": functools.partial(compressed, group=16)}
    weights = arrays_of(random_decoder(CONFIG))
    stored, values = {}, {}
    for name, value in weights.items():
        own = pack_model({name: value}, makes.get(name.split(".")[-2], compressed))
        stored, values = stored | own[0], values | own[1]
    write(tmp_path, stored, PACKED)
    checkpoint = open_checkpoint(tmp_path)
    plan = checkpoint.config.quantization
    eight = {"group_size": 32, "bits": 8, "mode": "affine"}
    ups = {f"model.layers.{i}.mlp.up_proj": eight for i in range(2)}
    assert plan == {"group_size": 32, "bits": 4, "mode": "affine"} | ups
    assert checkpoint.tensors["model.layers.0.self_attn.o_proj.weight"].dtype == mx.float32
    check_logits(tmp_path, values)


SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES = {
    "qwen3": {**SIZES, "head_dim": 16},
    "phi3": SIZES,  # fuses matrices
    "cohere": SIZES,  # other order of rotary rows
    "gpt_neox": {**SIZES, "num_key_value_heads": None},  # fuses matrices by head, with other names in mlx_lm
    "falcon": {**SIZES, "new_decoder_architecture": True, "num_kv_heads": 2},
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["gptq", "gptq-act-order", "fp8"])
def test_families_are_what_transformers_computes(tmp_path, name, family):
    oracles = pytest.importorskip("tests.transformers_oracle", reason="the oracle is transformers")
    torch = pytest.importorskip("torch")
    sizes = {name: value for name, value in FAMILIES[family].items() if value is not None}
    oracle = oracles.make_oracle(family, sizes, 97)
    settings, make = FORMATS[name]
    stored = {}
    state = oracle.state_dict()
    matrices = {n for n, value in state.items() if value.ndim == 2 and re.search(r"\.\d\.", n)}
    for tensor, value in state.items():
        if tensor in matrices:
            parts, values = make(tuple(value.shape))
            stored |= {f"{tensor.removesuffix('.weight')}.{part}": array for part, array in parts.items()}
            value.copy_(torch.from_numpy(values))
        else:
            stored[tensor] = value.numpy()
    config = oracle.config.to_dict()
    write(tmp_path, stored, settings)
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    tokens = np.array(TOKENS)
    logits = np.array(load_model(tmp_path)[0](TOKENS))
    np.testing.assert_allclose(logits, oracles.logits_of(oracle, tokens), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["gptq", "gptq-act-order", "awq", "fp8"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_read_one_by_one(tmp_path, name, family):
    """As in the hub's files, where routers aren't quantized."""
    experts = {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    config = CONFIG.with_changes(**experts, model_type=family, qk_norm="head" if family == "qwen3_moe" else None)
    model = random_decoder(config)
    settings, make = FORMATS[name]
    mappings = weight_mappings(config)
    arrays = {n: lazy_tensor(mx.array(value)) for n, value in arrays_of(model).items()}
    stored, values = {}, {}
    for tensor, lazy in to_file_weights(mappings, arrays).items():
        value = np.array(lazy.read())
        if value.ndim == 2 and ".layers." in tensor and ".gate." not in tensor:
            parts, value = make(value.shape)
            stored |= {f"{tensor.removesuffix('.weight')}.{part}": array for part, array in parts.items()}
        else:
            stored[tensor] = value
        values[tensor] = lazy_tensor(mx.array(value.astype(np.float32)))
    write(tmp_path, stored, settings, **config_to_hf(config))
    model.load_weights([(n, t.read()) for n, t in to_decoder_weights(mappings, values, "test").items()])
    logits = np.array(load_model(tmp_path)[0](TOKENS))
    np.testing.assert_allclose(logits, np.array(model(TOKENS)), rtol=1e-3, atol=1e-4)


UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("name", "part", "change", "expected"),
    [
        ("gptq", "qzeros", None, "has no qzeros"),
        ("gptq", "scales", lambda a: a[:, 1:], r"\.scales is \[2, 95\], it must have \[2, 96\]"),
        ("gptq", "scales", lambda a: a[:0], r"\.scales is \[0, 96\], it must have \[1, 96\]"),
        ("gptq", "qzeros", lambda a: a[1:], r"\.qzeros is \[1, 12\], it must have \[2, 12\]"),
        ("gptq", "qweight", lambda a: a[1:], r"\.g_idx is \[64\], it must have \[56\]"),
        ("gptq-3bit", "qweight", lambda a: a[1:], "has 5 words for 53 values, which are not 3 bits for each"),
        ("gptq", "qzeros", lambda a: a[:, 1:], "has 11 words for 96 values, which are not 2, 3, 4, 8 bits for each"),
        ("gptq", "qweight", lambda a: a.astype(np.int64), r"\.qweight is of type I64, it must be int32"),
        ("gptq", "qweight", lambda a: a[0], r"\.qweight is \[96\], it must have 2 dimensions"),
        ("gptq", "g_idx", lambda a: a + 1, r"\.g_idx has values that are not from 0 to 1"),
        ("gptq", "g_idx", lambda a: a[None], r"\.g_idx is \[1, 64\], it must have \[64\]"),
        ("awq", "qzeros", lambda a: a[:, 1:], r"\.qzeros is \[2, 11\], it must have \[2, 12\]"),
        ("awq", "qweight", lambda a: a[1:], "has 2 groups for 63 inputs"),
        ("packed-4bit", "weight_shape", lambda a: a - 1, r"weight_shape is \[95, 63\], and weight_packed has 96"),
        ("packed-4bit", "weight_scale", lambda a: a[1:], r"\[95, 2\], which doesn't fit a weight of \[96, 64\]"),
        ("packed-asymmetric", "weight_zero_point", lambda a: a[1:], r"point is \[11, 2\], it must have \[12, 2\]"),
        ("packed-act-order", "weight_g_idx", lambda a: -a, "g_idx has values that are not from 0 to 1"),
        ("int8-asymmetric", "weight_zero_point", lambda a: a[:1], r"point is \[1, 1\], the scales are \[96, 1\]"),
        ("int8", "weight", lambda a: a.astype(np.float32), r"\.weight is of type F32, it must be int8 or uint8"),
        ("fp8", "weight_scale_inv", lambda a: a[1:], r"\[1, 2\], which doesn't fit a weight of \[96, 64\]"),
        ("fp8", "weight", None, "has no weight"),
        ("nf4", "weight.absmax", lambda a: a[1:], r"absmax is \[95\], it must have \[96\]"),
        ("nf4", "weight", lambda a: a[1:], r"\.weight is \[3071, 1\], it must have \[3072, 1\]"),
        ("nf4", "weight.quant_map", None, "has no weight.quant_map"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda a: a[1:], "bitsandbytes__nf4"),
        ("nf4-nested", "weight.nested_quant_map", lambda a: a[1:], r"it must have \[256\]"),
        ("llm-int8", "SCB", lambda a: a[1:], r"\.SCB is \[95\], it must have \[96\]"),
        ("llm-int8", "weight_format", lambda a: a + 1, "int8 layout isn't supported"),
    ],
)  # fmt: skip
def test_errors_name_the_folder_and_the_tensor(tmp_path, name, part, change, expected):
    settings, make = FORMATS[name]
    stored, _ = pack_model(arrays_of(random_decoder(CONFIG)), make)
    value = stored.pop(f"{UP}.{part}")
    if change is not None:
        stored[f"{UP}.{part}"] = change(value)
    with pytest.raises(CheckpointError, match=expected) as raised:
        matrix(tmp_path, stored, settings)
    assert str(tmp_path) in str(raised.value) and UP in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("gptq", V1 | {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' isn't supported"),
        ("gptq", AUTO_ROUND | {"packing_format": "gguf"}, "packing_format 'gguf' isn't supported"),
        ("awq", AWQ | {"version": "gemv"}, "layout gemv with 4 bits isn't supported"),
        ("packed-4bit", PACKED | {"format": "marlin-24"}, "format 'marlin-24' isn't supported .try: its unquantized"),
        ("packed-4bit", PACKED | {"transform_config": {"a": 1}}, "transform_config isn't supported"),
        ("fp8", FP8 | {"weight_block_size": [0, 128]}, r"blocks of \[0, 128\], they must be two positive numbers"),
        ("nf4", {"quant_method": "torchao"}, "torchao checkpoint, which isn't supported .try: its unquantized"),
    ],
)  # fmt: skip
def test_settings_that_are_not_supported(tmp_path, name, settings, expected):
    stored, _ = pack_model(arrays_of(random_decoder(CONFIG)), FORMATS[name][1])
    with pytest.raises(CheckpointError, match=expected):
        load_model(write(tmp_path, stored, settings))


def test_inspect_reports_the_memory_of_dequantized_weights(tmp_path, monkeypatch):
    stored, values = pack_model(arrays_of(random_decoder(CONFIG)), nf4)
    checkpoint = open_checkpoint(write(tmp_path, stored, BNB))
    monkeypatch.setattr(inspect, "ON_CPU", False)
    description = inspect.describe(checkpoint)
    assert description.memory == 4 * sum(value.size for value in values.values()) > description.bytes
    assert description.types["NF4"][0] == 14 and description.quantization is None
