"""Folders that other programs quantized become folders of mlx_lm with the same weights."""

import functools
import json
import re

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import load_model, open_checkpoint
from mlxlm.checkpoint.lazy_tensor import lazy_tensor
from mlxlm.checkpoint.map_weights import to_file_weights
from mlxlm.convert import convert
from mlxlm.families import config_to_hf, weight_mappings
from tests.checkpoint.packed_weights import compressed, gptq, pack_model
from tests.checkpoint.test_quantized_formats import AFFINE, CONFIG, FORMATS, PACKED, TOKENS, UP, V1, write
from tests.small_models import arrays_of, random_decoder, write_peft

STAY = "the matrices stay quantized, in MLX's format, which transformers doesn't read"
WIDE = "scales and biases are float32, because float16 would round some of them: activations are float32, too"


def in_float16(stored, kept=()):
    """The file's tensors in float16, except integers and parts of the modules `kept`."""
    return {n: a.astype(np.float16) if a.dtype.kind == "f" and not n.startswith(kept) else a for n, a in stored.items()}


def folder_of(tmp_path, model, make, settings):
    """A folder with the matrices of the layers of `model` packed, in the names of its family."""
    arrays = {name: lazy_tensor(mx.array(value)) for name, value in arrays_of(model).items()}
    stored = {}
    for name, lazy in to_file_weights(weight_mappings(model.config), arrays).items():
        value, module = np.array(lazy.read()), name.removesuffix(".weight")
        if value.ndim == 2 and re.search(r"\.\d+\.", name) and not re.search(r"\.(gate|router)\.", name):
            stored |= {f"{module}.{part}": array for part, array in make(value.shape, name)[0].items()}
        else:
            stored[name] = value
    tmp_path.mkdir(exist_ok=True)
    return write(tmp_path, in_float16(stored), settings, **config_to_hf(model.config))


def assert_lossless(source, out):
    """Convert, and compare the weights with the source's and the greedy tokens with mlx_lm's."""
    mlx_lm = pytest.importorskip("mlx_lm.utils", reason="the oracle is mlx_lm")
    report = convert(source, out)
    results = {check.name: check.result for check in report.checks if check.name != "tokenizer"}
    assert results == dict.fromkeys(("tensors", "configuration", "logits"), "equal")
    theirs, ours = mlx_lm.load_model(out)[0], load_model(source)[0]
    theirs.set_dtype(mx.float32)
    wanted, found = np.array(ours(TOKENS)), np.array(theirs(TOKENS))
    np.testing.assert_allclose(found, wanted, atol=5e-4 * wanted.std())
    return report


@pytest.mark.parametrize("name", sorted(AFFINE))
def test_integers_stay_quantized(tmp_path, name):
    settings, make = FORMATS[name]
    source = folder_of(tmp_path / "in", random_decoder(CONFIG), lambda shape, _: make(shape), settings)
    report = assert_lossless(source, tmp_path / "out")
    exact = name in ("packed-4bit", "packed-8bit-channel")  # symmetric: biases are scales times a power of two
    assert report.notes == [STAY] + ([] if exact else [WIDE])
    tensors = open_checkpoint(tmp_path / "out").tensors
    dtype = mx.float16 if exact else mx.float32
    assert tensors[f"{UP}.weight"].dtype == mx.uint32 and tensors[f"{UP}.scales"].dtype == dtype
    written = json.loads((tmp_path / "out/config.json").read_text())
    bits = re.search(r"\d", report.dtype)[0]
    assert report.dtype == f"{bits}-bit" and written["quantization"]["bits"] == int(bits)
    assert "quant_method" not in written["quantization_config"]


FAMILIES = {
    "phi3": {"model_type": "phi3"},
    "cohere": {"model_type": "cohere", "norm": "layer_no_bias", "parallel_residual": True, "shared_norm": True},
    "gpt_neox": {
        "model_type": "gpt_neox", "norm": "layer", "parallel_residual": True, "attention_bias": True, "mlp_bias": True,
        "mlp_gated": False, "num_key_value_heads": 4, "tie_word_embeddings": False, "hidden_act": "gelu",
        "intermediate_size": 256,  # as mlx_lm has it, whatever the configuration says
    },
    "mixtral": {
        "model_type": "mixtral", "num_experts": 3, "num_experts_per_tok": 2, "tie_word_embeddings": False,
        "moe_intermediate_size": 96,
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_matrices_of_several_bits(tmp_path, family):
    """Other names, fused matrices and experts; the output projection has more bits than the others."""
    eight = ("o_proj", "attention.dense", "experts.0.w2", "experts.1.w2", "experts.2.w2")

    def make(shape, name):
        return gptq(shape, bits=8 if name.removesuffix(".weight").endswith(eight) else 4)

    model = random_decoder(CONFIG.with_changes(**FAMILIES[family]))
    report = assert_lossless(folder_of(tmp_path / "in", model, make, V1), tmp_path / "out")
    assert report.dtype == "4-bit, 8-bit"


def test_what_mlx_has_no_format_for_is_dequantized_and_named(tmp_path):
    makes = {"v_proj": functools.partial(compressed, group=16), "o_proj": functools.partial(compressed, act_order=True)}

    def make(shape, name):
        return makes.get(name.split(".")[-2], compressed)(shape)

    source = folder_of(tmp_path / "in", random_decoder(CONFIG), make, PACKED)
    report = convert(source, tmp_path / "out")
    assert {check.result for check in report.checks} <= {"equal", "within rounding", "skipped"}
    kinds = {"v_proj": "in groups of 16", "o_proj": "in act-order"}
    assert sorted(report.notes[1:]) == sorted(
        f"dequantized from PACKED_INT4 {kind}, which MLX has no format for: model.layers.*.self_attn.{name}"
        for name, kind in kinds.items()
    )
    tensors = open_checkpoint(tmp_path / "out").tensors
    assert tensors["model.layers.0.self_attn.o_proj.weight"].dtype == mx.float16
    assert tensors[f"{UP}.weight"].dtype == mx.uint32


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp8", None), ("nf4", None), ("gptq-act-order", None), ("gptq", "float16")]
)
def test_dequantized_folders(tmp_path, name, dtype):
    settings, make = FORMATS[name]
    stored, values = pack_model(arrays_of(random_decoder(CONFIG)), make)
    layers = tuple(n.removesuffix("weight") for n in values if ".layers." in n and values[n].ndim == 2)
    report = convert(write(tmp_path, in_float16(stored, layers), settings), tmp_path / "out", dtype=dtype)
    assert report.dtype == "float16"
    assert [note.split(" from ")[0] for note in report.notes] == ([] if dtype else ["dequantized"])
    assert {check.result for check in report.checks} <= {"equal", "within rounding", "skipped"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["torch_dtype"] == "float16"
    assert "quantization" not in config
    read = open_checkpoint(tmp_path / "out").tensors[f"{UP}.weight"].read()
    np.testing.assert_array_equal(np.array(read), values[f"{UP}.weight"].astype(np.float16))


def test_what_an_adapter_changes_has_the_dtype_of_the_others(tmp_path):
    source = folder_of(tmp_path / "in", random_decoder(CONFIG), lambda shape, _: gptq(shape), V1)
    halves = {f"{UP}.lora_A.weight": mx.ones((2, 64)), f"{UP}.lora_B.weight": mx.full((96, 2), 0.1)}
    adapter = write_peft(tmp_path / "adapter", halves)
    with pytest.warns(UserWarning, match="1 quantized matrix is dequantized"):
        report = convert(source, tmp_path / "out", adapter=adapter, verify_output=False)
    tensors = open_checkpoint(tmp_path / "out").tensors
    assert report.dtype == "4-bit" and tensors[f"{UP}.weight"].dtype == mx.float16
    assert tensors[UP.replace("up", "gate") + ".weight"].dtype == mx.uint32
