"""Opened files: whole and split, their configuration, and Gemma 3, which mlx_lm runs."""

from __future__ import annotations

import struct
from dataclasses import replace
from types import SimpleNamespace

import gguf as gguf_package
import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import gguf
from mlxlm.checkpoint.gguf.architectures import ARCHITECTURES
from mlxlm.checkpoint.gguf.header import read_header
from mlxlm.checkpoint.load import load_model
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.utils.errors import CheckpointError, ConfigError
from tests.checkpoint.gguf.gguf_models import random_model
from tests.checkpoint.raw_files import add_sizes, array, finish, small_llama
from tests.small_models import tensors_of


def split(model, tokenizer, folder, parts=3):
    """A model in parts, by the gguf package."""
    gguf.write(folder / "whole.gguf", model.config, tensors_of(model), tokenizer, "F32")
    whole = gguf_package.GGUFReader(folder / "whole.gguf")
    paths = []
    for i in range(parts):
        paths.append(folder / f"m-{i + 1:05d}-of-{parts:05d}.gguf")
        writer = gguf_package.GGUFWriter(paths[-1], "llama")
        if i == 0:
            for name, field in whole.fields.items():
                if not name.startswith("GGUF.") and name != "general.architecture":
                    kinds = field.types
                    writer.add_key_value(name, field.contents(), kinds[0], *([] if len(kinds) == 1 else [kinds[-1]]))
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", parts)
        writer.add_int32("split.tensors.count", len(whole.tensors))
        for tensor in whole.tensors[i::parts]:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        finish(writer)
    return paths


def test_split_model_opens_by_any_part(tiny_tokenizer, tmp_path):
    model = random_model("llama", tiny_tokenizer)
    paths = split(model, tiny_tokenizer, tmp_path)
    whole = open_checkpoint(tmp_path / "whole.gguf")
    (tmp_path / "parts").mkdir()
    for path in [*paths, tmp_path / "mmproj-m-f16.gguf"]:  # an image encoder
        (tmp_path / "parts" / path.name).symlink_to(path)
    (tmp_path / "mmproj-m-f16.gguf").write_bytes(b"GGUF")
    with pytest.warns(match="mmproj-m-f16.gguf is ignored"):
        assert open_checkpoint(tmp_path / "parts").path.name == "m-00001-of-00003.gguf"
    for path in paths:
        parts = open_checkpoint(path)
        assert parts.config == whole.config and set(parts.tensors) == set(whole.tensors)
        assert parts.load_tokenizer().fingerprint == tiny_tokenizer.fingerprint
        for name, tensor in parts.tensors.items():
            assert (tensor.read() == whole.tensors[name].read()).all().item()
    paths[1].unlink()
    with pytest.raises(CheckpointError, match="m-00002-of-00003.gguf"):
        open_checkpoint(paths[0])
    paths[1].write_bytes(paths[2].read_bytes())
    with pytest.raises(CheckpointError, match="m-00002-of-00003.gguf: split.no"):
        open_checkpoint(paths[0])


def test_file_truncated_after_opening(tiny_tokenizer, tmp_path):
    model = random_model("llama", tiny_tokenizer)
    path = tmp_path / "m.gguf"
    gguf.write(path, model.config, tensors_of(model), tiny_tokenizer, "F32")
    opened = open_checkpoint(path)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="has become shorter"):
        opened.tensors["lm_head.weight"].read()
    with pytest.raises(CheckpointError, match="has become shorter"):
        opened.load_tokenizer()


def test_fused_projections_of_old_phi_2_files(tiny_tokenizer, tmp_path, monkeypatch):
    model, phi2 = random_model("phi2", tiny_tokenizer), gguf.architectures.ARCHITECTURES["phi2"]
    fused = {name: modules for name, modules in phi2.layer.items() if name not in ("attn_q", "attn_k", "attn_v")}
    with monkeypatch.context() as patch:
        patch.setitem(gguf.architectures.ARCHITECTURES, "phi2", replace(phi2, layer=fused))
        gguf.write(tmp_path / "m.gguf", model.config, tensors_of(model), tiny_tokenizer, "F32")
    assert "blk.0.attn_qkv.weight" in gguf.header.read_header(tmp_path / "m.gguf").tensors
    for name, tensor in open_checkpoint(tmp_path / "m.gguf").tensors.items():
        assert mx.array_equal(tensor.read(), tensors_of(model)[name].read()), name


def test_windows_may_be_a_list_of_all_layers(tiny_tokenizer, tmp_path, monkeypatch):
    """As llama.cpp's converter writes them for OLMo 3 and EXAONE 4."""
    model, has_window = random_model("olmo3", tiny_tokenizer), [False, True, True, False, True]
    files = replace(ARCHITECTURES["olmo2"], metadata=lambda config: {"attention.sliding_window_pattern": has_window})
    monkeypatch.setitem(ARCHITECTURES, "olmo2", files)
    gguf.write(tmp_path / "m.gguf", model.config, tensors_of(model), tiny_tokenizer, "F32")
    types = open_checkpoint(tmp_path / "m.gguf").config.layer_types
    assert [kind == "sliding_attention" for kind in types] == has_window
    has_window.append(True)
    gguf.write(tmp_path / "m.gguf", model.config, tensors_of(model), tiny_tokenizer, "F32")
    with pytest.raises(CheckpointError, match="sliding_window_pattern has 6 values, one for each of 5 layers"):
        open_checkpoint(tmp_path / "m.gguf")


def test_small_llama_opens(tmp_path):
    assert open_checkpoint(small_llama(tmp_path, {})).config.hidden_size == 4
    same_for_all = {"llama.attention.head_count_kv": array(4, 1, struct.pack("<I", 2))}
    assert open_checkpoint(small_llama(tmp_path, same_for_all)).config.num_key_value_heads == 2


@pytest.mark.parametrize(
    ("pooling_type", "pooling", "unsupported"),
    [
        (0, "mean", None),
        (1, "mean", None),
        (3, "last", None),
        (2, "mean", "the pooling type 2 of GGUF"),
        ("x", "mean", "the pooling type 'x' of GGUF"),
    ],
)
def test_the_pooling_of_an_embedding_model(tmp_path, pooling_type, pooling, unsupported):
    embedding = open_checkpoint(small_llama(tmp_path, {"llama.pooling_type": pooling_type})).embedding
    assert (embedding.pooling, embedding.unsupported) == (pooling, unsupported)


def test_token_id_outside_the_vocabulary_is_an_error(tiny_tokenizer, tmp_path):
    model, path = random_model("qwen2", tiny_tokenizer), tmp_path / "m.gguf"
    gguf.write(path, model.config, tensors_of(model), tiny_tokenizer, "F16")
    key = b"bos_token_id" + struct.pack("<I", 4)
    path.write_bytes(path.read_bytes().replace(key + struct.pack("<I", 0), key + struct.pack("<I", 1 << 30), 1))
    with pytest.raises(ConfigError, match="m.gguf.*bos_token_id is 1073741824, it must be a token id below"):
        open_checkpoint(path)


GEMMA3 = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "query_pre_attn_scalar": 32, "sliding_window": 8, "max_position_embeddings": 64,
}  # fmt: skip


def test_keys_that_no_layer_reads(tiny_tokenizer, tmp_path):
    """Gemma 4's checkpoints have key projections in the layers that share those of others, too."""
    model = random_model("gemma4", tiny_tokenizer)
    tensors = tensors_of(model)
    unused = {"model.layers.5.self_attn.k_proj.weight": tensors["model.layers.2.self_attn.k_proj.weight"]}
    gguf.write(tmp_path / "m.gguf", model.config, {**tensors, **unused}, tiny_tokenizer, "F32")
    assert "blk.5.attn_k.weight" in read_header(tmp_path / "m.gguf").tensors
    assert open_checkpoint(tmp_path / "m.gguf").tensors.keys() == tensors.keys()


def write_gemma3(path, model, factor):
    """Write a file as llama.cpp's converter does."""
    writer = gguf_package.GGUFWriter(path, "gemma3")
    add_sizes(writer, SimpleNamespace(**GEMMA3))
    writer.add_key_length(GEMMA3["head_dim"])
    writer.add_value_length(GEMMA3["head_dim"])
    writer.add_sliding_window(GEMMA3["sliding_window"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)  # of layers without a window
    if factor != 1:
        writer.add_rope_scaling_type(gguf_package.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(factor)
    names = gguf_package.get_tensor_name_map(gguf_package.MODEL_ARCH.GEMMA3, GEMMA3["num_hidden_layers"])
    for name, value in model.state_dict().items():
        if name != "lm_head.weight":  # the embedding
            value = value.numpy() + (1 if name.endswith("norm.weight") else 0)
            writer.add_tensor(names.get_name(name, (".weight",)), value)
    finish(writer)


@pytest.mark.parametrize("factor", [1, 8.0])
def test_gemma3_against_transformers(factor, tmp_path):
    oracle = pytest.importorskip("tests.transformers_oracle", reason="transformers or PyTorch is not installed")
    full = {"rope_type": "linear", "factor": factor} if factor != 1 else {"rope_type": "default"}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    rope = {"full_attention": {**full, "rope_theta": 1e6}, "sliding_attention": sliding}
    model = oracle.make_oracle("gemma3_text", {**GEMMA3, "rope_parameters": rope}, 97, "eager")
    write_gemma3(tmp_path / "m.gguf", model, factor)
    tokens = np.arange(40).reshape(1, 40) % 97
    expected = oracle.logits_of(model, tokens)
    logits = np.array(load_model(tmp_path / "m.gguf")[0](mx.array(tokens)).astype(mx.float32))
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()
