"""Written models of every family: bit-equal when read back, run by llama.cpp, or an error."""

from __future__ import annotations

import ctypes
import itertools
import json

import gguf as gguf_package
import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import gguf, huggingface
from mlxlm.checkpoint.gguf import writer
from mlxlm.checkpoint.gguf.header import Array, read_header
from mlxlm.checkpoint.gguf.writer import architecture_for
from mlxlm.checkpoint.lazy_tensor import lazy_tensor
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.checkpoint.safetensors import load_weights
from mlxlm.families import config_from_hf, config_to_hf
from mlxlm.utils.errors import CheckpointError
from tests.checkpoint.gguf.gguf_models import LARGE_MODELS, MODELS, random_model
from tests.small_models import random_decoder, tensors_of


def bits(value: mx.array) -> bytes:
    return np.array(value.astype(mx.bfloat16).view(mx.uint16)).tobytes()


@pytest.mark.parametrize("model", [*MODELS, *LARGE_MODELS], indirect=True)
def test_folder_to_gguf_to_folder_is_bit_equal(model, tiny_tokenizer, tmp_path):
    config, path = model.config, tmp_path / "m.gguf"
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    huggingface.write(tmp_path / "a", config_to_hf(config), config, tensors_of(model, mx.bfloat16), tiny_tokenizer)
    first = open_checkpoint(tmp_path / "a")
    assert not gguf.write(path, first.config, first.tensors, first.load_tokenizer(), "BF16").other_types
    second = open_checkpoint(path)
    assert second.config == config
    for name, tensor in second.tensors.items():
        value = tensor.read()
        assert (tensor.shape, tensor.dtype) == (tuple(value.shape), value.dtype), name
    sixteen = {name: tensor.astype(mx.bfloat16) for name, tensor in second.tensors.items()}
    huggingface.write(tmp_path / "b", second.hf_config, second.config, sixteen, second.load_tokenizer())
    before, after = load_weights(tmp_path / "a"), load_weights(tmp_path / "b")
    assert {name: bits(value) for name, value in before.items()} == {name: bits(value) for name, value in after.items()}
    for name in ("config.json", "tokenizer.json"):
        assert json.loads((tmp_path / "a" / name).read_text()) == json.loads((tmp_path / "b" / name).read_text())


@pytest.mark.parametrize("model", [*MODELS, *LARGE_MODELS], indirect=True)
def test_llama_cpp_logits_are_the_same(model, tensors, tiny_tokenizer, tmp_path, open_llama_cpp):
    if (model.config.rope_scaling or {}).get("truncate") is False:
        pytest.skip("llama.cpp rounds the limits between YaRN's frequencies")
    gguf.write(tmp_path / "m.gguf", model.config, tensors, tiny_tokenizer, "F32")
    reference = open_llama_cpp(tmp_path / "m.gguf", logits_all=True)
    tokens = np.random.default_rng(0).integers(0, 300, 40).tolist()
    reference.eval(tokens)
    expected = np.array(reference.scores[: len(tokens)])
    logits = np.array(model(mx.array([tokens]))[0])
    # llama.cpp takes GELU from a table in float16, and has no other form of it than with tanh.
    assert np.abs(logits - expected).max() < 0.01 * logits.std()
    for _ in range(16):
        tokens.append(int(expected[-1].argmax()))
        reference.eval(tokens[-1:])
        expected = np.array(reference.scores[len(tokens) - 1 : len(tokens)])
    greedy = np.array(model(mx.array([tokens]))[0]).argmax(-1)
    assert greedy[39:-1].tolist() == tokens[40:]


def test_gguf_package_reads_our_header(tiny_tokenizer, tmp_path):
    model = random_model("llama-3", tiny_tokenizer)
    gguf.write(tmp_path / "m.gguf", model.config, tensors_of(model), tiny_tokenizer, "F16")
    reference, ours = gguf_package.GGUFReader(tmp_path / "m.gguf"), read_header(tmp_path / "m.gguf")
    metadata = {name: reference.get_field(name).contents() for name in reference.fields if not name.startswith("GGUF.")}
    read = {name: value.read() if isinstance(value, Array) else value for name, value in ours.metadata.items()}
    assert metadata == read
    offsets = {tensor.name: (tensor.data_offset, tensor.n_bytes) for tensor in reference.tensors}
    assert offsets == {name: (info.offset, info.nbytes) for name, info in ours.tensors.items()}


@pytest.mark.parametrize("kind", [kind for kind in gguf.OUTTYPES if "_K" not in kind and kind != "MXFP4"])
def test_every_outtype_equals_the_gguf_package(kind, tiny_tokenizer, tmp_path):
    model = random_model("gpt2", tiny_tokenizer)
    result = gguf.write(tmp_path / "m.gguf", model.config, tensors_of(model), tiny_tokenizer, kind)
    reader = gguf_package.GGUFReader(tmp_path / "m.gguf")
    by_name = {tensor.name: tensor for tensor in reader.tensors}
    assert by_name["output_norm.weight"].tensor_type.name == by_name["position_embd.weight"].tensor_type.name == "F32"
    matrix = by_name["blk.1.ffn_up.weight"]
    assert matrix.tensor_type.name == kind
    expected = gguf_package.quants.quantize(np.array(model.layers[1].mlp.up_proj.weight), matrix.tensor_type)
    np.testing.assert_array_equal(np.asarray(matrix.data).view(np.uint8), expected.view(np.uint8))
    head = "Q8_0" if kind == "Q4_0" else kind
    assert by_name["token_embd.weight"].tensor_type.name == head  # the head too: they are tied
    assert result.other_types == ({"token_embd.weight": "Q8_0"} if kind == "Q4_0" else {})
    file_type = gguf_package.LlamaFileType(reader.get_field("general.file_type").contents()).name
    assert file_type in (f"ALL_{kind}", f"MOSTLY_{kind}")


# The types of matrices in 8 layers, as llama.cpp's quantizer chooses them (llama_tensor_get_type): layers 0, 3, 6 and 7
# have more bits. Rows of 96 don't have blocks of 256.
K_TYPES = {
    "Q4_K_M": {
        "Q4_K": "token_embd blk.0.attn_k blk.1.attn_v blk.2.attn_v blk.5.ffn_up", "Q5_0": "blk.1.ffn_down",
        "Q6_K": "output blk.0.attn_v blk.3.attn_v blk.6.attn_v blk.7.attn_v", "Q8_0": "blk.0.ffn_down blk.7.ffn_down",
    },
    "Q5_K_M": {"Q5_K": "token_embd blk.0.attn_q blk.1.attn_v", "Q6_K": "output blk.3.attn_v", "Q5_1": "blk.4.ffn_down"},
    "Q6_K": {"Q6_K": "token_embd output blk.1.attn_v blk.5.attn_q", "Q8_0": "blk.1.ffn_down blk.3.ffn_down"},
    "Q3_K_M": {
        "Q3_K": "token_embd blk.0.attn_q blk.0.ffn_up", "Q5_K": "blk.0.attn_v blk.1.attn_v", "Q6_K": "output",
        "Q4_K": "blk.2.attn_v", "Q5_0": "blk.0.attn_output blk.0.ffn_down blk.7.ffn_down",
    },
    "Q2_K": {"Q2_K": "token_embd blk.0.attn_k blk.7.ffn_up", "Q3_K": "blk.7.attn_v",
             "Q4_0": "blk.0.ffn_down blk.7.attn_output", "Q6_K": "output"},
}  # fmt: skip


@pytest.mark.parametrize("outtype", K_TYPES)
def test_types_of_k_quants(outtype, tiny_tokenizer, tmp_path):
    config = random_model("llama", tiny_tokenizer).config.with_changes(
        hidden_size=256, head_dim=32, intermediate_size=96, num_hidden_layers=8
    )
    model = random_decoder(config)
    result = gguf.write(tmp_path / "m.gguf", config, tensors_of(model), tiny_tokenizer, outtype)
    reader = gguf_package.GGUFReader(tmp_path / "m.gguf")
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    for kind, names in K_TYPES[outtype].items():
        assert {types[f"{name}.weight"] for name in names.split()} == {kind}, names
    others = {name: kind for name, kind in types.items() if "norm" not in name and kind != outtype.removesuffix("_M")}
    assert result.other_types == others
    file_type = gguf_package.LlamaFileType(reader.get_field("general.file_type").contents()).name
    assert file_type == f"MOSTLY_{outtype}"
    again, weight = open_checkpoint(tmp_path / "m.gguf"), model.layers[3].self_attn.v_proj.weight
    read = again.tensors["model.layers.3.self_attn.v_proj.weight"].read()
    assert 0 < mx.abs(read - weight).max() < 0.3 * mx.abs(weight).max()


def llama_cpp_quantizes(cpp, source, out, outtype, importance):
    """Quantize a file with llama.cpp, with `importance` by name of the tensor."""
    params = cpp.llama_model_quantize_default_params()
    params.ftype = gguf_package.LlamaFileType[f"MOSTLY_{outtype}"].value
    pointers = [value.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for value in importance.values()]
    entries = [(n.encode(), p, v.size) for (n, v), p in zip(importance.items(), pointers, strict=True)]
    params.imatrix = (cpp.llama_model_imatrix_data * (len(entries) + 1))(*entries) if entries else None
    assert cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params)) == 0


def test_k_quants_are_those_of_llama_cpp(model, tiny_tokenizer, tmp_path):
    """Types and bytes, without importance weights and with; not of Falcon, which has other types."""
    cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed").llama_cpp
    if model.config.model_type == "falcon":
        return
    wide = {"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 16, "intermediate_size": 256}
    if model.config.model_type == "qwen2":  # the others have no rows of 256
        model = random_decoder(model.config.with_changes(**wide))
    config, tensors, rng = model.config, tensors_of(model), np.random.default_rng(0)
    gguf.write(tmp_path / "whole.gguf", config, tensors, tiny_tokenizer, "F32")
    per_head = ("embed_q.weight", "unembed_out.weight")
    importance = {
        name.removesuffix(".weight"): rng.uniform(0.01, 10, tensor.shape[:-2] + tensor.shape[-1:]).astype(np.float32)
        for name, tensor in tensors.items()
        if ".layers." in name and name.endswith("_proj.weight") and len(tensor.shape) > 1 and name not in per_head
    }
    for mapping in architecture_for(config).weight_mappings(config):  # fused matrices have the same inputs
        importance |= {module: importance[mapping.modules[0]] for module in mapping.modules if module in importance}
    # A file whose matrices have equal rows, for the order of columns.
    rows = {f"{module}.weight": mx.array(value)[..., None, :] for module, value in importance.items()}
    rows = {name: lazy_tensor(mx.broadcast_to(value, tensors[name].shape)) for name, value in rows.items()}
    gguf.write(tmp_path / "rows.gguf", config, {**tensors, **rows}, tiny_tokenizer, "F32")
    matrices = [t for t in gguf_package.GGUFReader(tmp_path / "rows.gguf").tensors if len(t.shape) > 1]
    of_file = {t.name: t.data[..., 0, :].copy() for t in matrices if (t.data == t.data[..., :1, :]).all()}
    for outtype, given in itertools.product(K_TYPES, ({}, importance)):
        llama_cpp_quantizes(cpp, tmp_path / "whole.gguf", tmp_path / "theirs.gguf", outtype, of_file if given else {})
        gguf.write(tmp_path / "ours.gguf", config, tensors, tiny_tokenizer, outtype, given)
        files = (gguf_package.GGUFReader(tmp_path / f"{name}.gguf") for name in ("ours", "theirs"))
        ours, theirs = ({tensor.name: tensor for tensor in file.tensors} for file in files)
        assert {n: t.tensor_type.name for n, t in ours.items()} == {n: t.tensor_type.name for n, t in theirs.items()}
        for name, tensor in ours.items():
            np.testing.assert_array_equal(tensor.data.ravel(), theirs[name].data.ravel(), name)


def test_eight_experts_have_better_attention(tiny_tokenizer):
    config = random_model("mixtral", tiny_tokenizer).config.with_changes(num_experts=8)
    kinds = {
        part: writer._mixed_type(f"blk.1.{part}.weight", "Q4_K_M", config, (1, 3))
        for part in ("attn_v", "attn_k", "attn_output")
    }
    assert kinds == {"attn_v": "Q8_0", "attn_k": "Q8_0", "attn_output": "Q5_K"}


def test_unquantizable_rows_are_float16(tiny_tokenizer, tmp_path):
    model = random_model("llama", tiny_tokenizer)
    config = model.config.with_changes(intermediate_size=72)
    tensors = tensors_of(model)
    for i in range(config.num_hidden_layers):
        mlp = f"model.layers.{i}.mlp"
        tensors |= {f"{mlp}.{name}_proj.weight": lazy_tensor(mx.ones((72, 64))) for name in ("gate", "up")}
        tensors[f"{mlp}.down_proj.weight"] = lazy_tensor(mx.ones((64, 72)))
    result = gguf.write(tmp_path / "m.gguf", config, tensors, tiny_tokenizer, "Q8_0")
    assert result.other_types == {f"blk.{i}.ffn_down.weight": "F16" for i in range(config.num_hidden_layers)}


def test_tied_olmo2_gets_an_output_head(tiny_tokenizer, tmp_path):
    """llama.cpp's OLMo 2 asks for output.weight."""
    model = random_model("olmo2", tiny_tokenizer)
    config = model.config.with_changes(tie_word_embeddings=True)
    tensors = {name: tensor for name, tensor in tensors_of(model).items() if name != "lm_head.weight"}
    gguf.write(tmp_path / "m.gguf", config, tensors, tiny_tokenizer, "F32")
    again = open_checkpoint(tmp_path / "m.gguf")
    embedding, head = (again.tensors[f"{name}.weight"].read() for name in ("model.embed_tokens", "lm_head"))
    assert bits(embedding) == bits(head)


def test_numbers_beyond_32_bits_are_errors(tiny_tokenizer, tmp_path):
    model = random_model("llama", tiny_tokenizer)
    scaling = {**MODELS["llama-3"]["rope_scaling"], "original_max_position_embeddings": 2**33}
    config = model.config.with_changes(rope_scaling=scaling)
    with pytest.raises(CheckpointError, match=r"original_context_length is .*8589934592"):
        gguf.write(tmp_path / "m.gguf", config, tensors_of(model), tiny_tokenizer, "F16")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_llama_cpp_runs_quantized_files(kind, tiny_tokenizer, tmp_path, open_llama_cpp):
    model = random_model("qwen2", tiny_tokenizer)
    gguf.write(tmp_path / "m.gguf", model.config, tensors_of(model), tiny_tokenizer, kind)
    again = open_checkpoint(tmp_path / "m.gguf")
    model.load_weights([(name, tensor.read().astype(mx.float32)) for name, tensor in again.tensors.items()])
    tokens = np.random.default_rng(0).integers(0, 300, 24).tolist()
    reference = open_llama_cpp(tmp_path / "m.gguf", logits_all=True)
    reference.eval(tokens)
    expected, logits = np.array(reference.scores[:24]), np.array(model(mx.array([tokens]))[0])
    # llama.cpp multiplies with activations in 8 bits: errors of 1% in each product, through three layers.
    assert np.abs(logits - expected).mean() < 0.05 * logits.std()


UNSUPPORTED = {
    "llama": [{"hidden_act": "relu"}, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}],
    "qwen2": [{"head_dim": 32}],
    "gemma2": [{"query_pre_attn_scalar": 64}, {"attn_logit_softcapping": None}, {"layer_types": None}],
    "gemma4": [{"num_kv_shared_layers": 1}, {"layer_types": None}, {"rope_scaling": None}],
    "gpt2": [{"mlp_bias": False}],
}


@pytest.mark.parametrize("name, change", [(name, change) for name in UNSUPPORTED for change in UNSUPPORTED[name]])
def test_unsupported_fields_are_errors(name, change, tiny_tokenizer, tmp_path):
    model = random_model(name, tiny_tokenizer)
    config = model.config.with_changes(**change)
    with pytest.raises(CheckpointError, match=next(iter(change)) if "rope_scaling" not in change else "rope_type"):
        gguf.write(tmp_path / "m.gguf", config, tensors_of(model), tiny_tokenizer, "F16")
    assert not list(tmp_path.iterdir())


def test_unsupported_family_is_an_error():
    opt = {
        "model_type": "opt", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "ffn_dim": 64,
        "vocab_size": 300, "max_position_embeddings": 64,
    }  # fmt: skip
    with pytest.raises(CheckpointError, match="no opt models"):
        architecture_for(config_from_hf(opt))


def test_ignored_sliding_window_is_noted(tiny_tokenizer, tmp_path):
    model = random_model("mistral", tiny_tokenizer)
    result = gguf.write(tmp_path / "m.gguf", model.config, tensors_of(model), tiny_tokenizer, "F16")
    assert any("beyond 64 tokens" in note for note in result.warnings)
