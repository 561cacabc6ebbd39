"""Files as llama.cpp's converter writes them, of the models whose tensors it changes most."""

from __future__ import annotations

import gguf as gguf_package
import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint import gguf
from mlxlm.checkpoint.load import load_model
from mlxlm.checkpoint.open import open_checkpoint
from mlxlm.families import family_config
from tests.checkpoint.gguf.gguf_models import MODELS, VOCAB
from tests.checkpoint.raw_files import finish

oracles = pytest.importorskip("tests.transformers_oracle", reason="transformers or PyTorch is not installed")
KEYS, VALUES = 2, 6  # heads
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (1, 40))


def tiled(value):
    """The heads of values: the first ones of all key heads, then the second ones, and so on."""
    return value.reshape(KEYS, VALUES // KEYS, -1, *value.shape[1:]).swapaxes(0, 1).reshape(value.shape)


def converted(name, value, reorders):
    """What the converter makes of a tensor of transformers: names of the same kind, and values."""
    reorder = tiled if reorders else lambda value: value
    if name.endswith("A_log"):
        return {name: reorder(-np.exp(value))}
    if name.endswith("dt_bias"):
        return {name.replace("dt_bias", "dt_proj.bias"): reorder(value)}
    if name.endswith("norm.weight") and "linear_attn" not in name:
        return {name: value + 1}
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(value, 2, axis=1)
        return {name.replace("gate_up_proj", f"{part}_proj.weight"): v for part, v in (("gate", gate), ("up", up))}
    if name.endswith("experts.down_proj"):
        return {f"{name}.weight": value}
    if name.endswith("in_proj_qkvz.weight"):  # of each key head: query, key, values, gates
        dim = len(value) // (2 * KEYS + 2 * VALUES)
        parts = np.split(value.reshape(KEYS, -1, value.shape[1]), [dim, 2 * dim, 5 * dim], axis=1)
        *qkv, z = (part.reshape(-1, value.shape[1]) for part in parts)
        return {name.replace("qkvz", "qkv"): np.concatenate(qkv), name.replace("qkvz", "z"): z}
    if name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
        value, keys = value.reshape(len(value), -1), len(value) * 2 * KEYS // (2 * KEYS + VALUES)
        return {name: np.concatenate([value[:keys], reorder(value[keys:])])}
    if name.endswith(("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight")):
        return {name: reorder(value)}
    if name.endswith("linear_attn.out_proj.weight"):
        return {name: np.ascontiguousarray(reorder(value.T).T)}
    return {name: value}


@pytest.mark.parametrize(
    ("model", "architecture"), [("qwen3-next", "QWEN3NEXT"), ("qwen3.5", "QWEN35"), ("qwen3.5-moe", "QWEN35MOE")]
)
def test_files_of_llama_cpp_and_ours_are_the_same(model, architecture, tiny_tokenizer, tmp_path):
    """With a layer that predicts several tokens, and without the width of dense layers, which it may not write."""
    values = {name: value for name, value in MODELS[model].items() if name not in ("model_type", "vocab_size")}
    values = {"rms_norm_eps": 1e-3, **values, "num_hidden_layers": 4, "partial_rotary_factor": 0.25}
    oracle = oracles.make_oracle(MODELS[model]["model_type"], {**values, "full_attention_interval": 2}, VOCAB)
    oracle.save_pretrained(tmp_path / "folder")
    folder = open_checkpoint(tmp_path / "folder")
    config, kind = folder.config, getattr(gguf_package.MODEL_ARCH, architecture)
    dim = config.linear_key_head_dim
    sizes = {
        "context_length": 128, "embedding_length": 64, "block_count": 5, "nextn_predict_layers": 1,
        "attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 32,
        "attention.value_length": 32, "rope.dimension_count": 8, "ssm.conv_kernel": 4, "ssm.state_size": dim,
        "ssm.group_count": KEYS, "ssm.time_step_rank": VALUES, "ssm.inner_size": VALUES * dim,
        "full_attention_interval": 2,
    }  # fmt: skip
    if config.num_experts:
        sizes |= {"expert_count": 5, "expert_used_count": 2, "expert_feed_forward_length": 32}
        sizes["expert_shared_feed_forward_length"] = 64
        config = config.with_changes(intermediate_size=32)  # of no layer
    else:
        sizes["feed_forward_length"] = 96
    writer = gguf_package.GGUFWriter(tmp_path / "m.gguf", gguf_package.MODEL_ARCH_NAMES[kind])
    for name, value in sizes.items():
        writer.add_uint32(f"{writer.arch}.{name}", value)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_tensor("blk.4.attn_norm.weight", np.ones(64, np.float32))
    names, expected = gguf_package.get_tensor_name_map(kind, 4), {}
    for hf_name, value in oracle.state_dict().items():
        for name, array in converted(hf_name, value.numpy(), reorders="35" in architecture).items():
            if not (config.tie_word_embeddings and name == "lm_head.weight"):
                expected[names.get_name(name, (".weight", ".bias"))] = array
    for name, array in expected.items():
        writer.add_tensor(name, array)
    finish(writer)

    logits = oracles.logits_of(oracle, TOKENS)
    found = np.array(load_model(tmp_path / "m.gguf")[0](mx.array(TOKENS)))
    assert np.abs(found - logits).max() < 5e-4 * logits.std()
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    assert open_checkpoint(tmp_path / "m.gguf").hf_config == family_config(config.with_changes(**ids))
    gguf.write(tmp_path / "ours.gguf", config, folder.tensors, tiny_tokenizer, "F32")
    ours = {tensor.name: tensor.data for tensor in gguf_package.GGUFReader(tmp_path / "ours.gguf").tensors}
    assert ours.keys() == expected.keys()
    for name, array in expected.items():
        if name.endswith("ffn_gate_inp_shexp.weight"):  # a row of the converter, a vector of llama.cpp's quantizer
            array = array[0]
        np.testing.assert_allclose(ours[name], array, atol=1e-6, err_msg=name)
