"""Gemma 3, which mlx_lm runs, against transformers."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.load import load_model

pytest.importorskip("mlx_lm.utils", reason="mlx_lm is not installed")
oracle = pytest.importorskip("tests.transformers_oracle", reason="transformers or PyTorch is not installed")

SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7, "num_attention_heads": 4, "head_dim": 32,
    "num_key_value_heads": 2, "query_pre_attn_scalar": 32, "sliding_window": 8, "max_position_embeddings": 64,
}  # fmt: skip


def write(path, model, factor):
    """Write a file as llama.cpp's converter does."""
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_key_length(SIZES["head_dim"])
    writer.add_value_length(SIZES["head_dim"])
    writer.add_sliding_window(SIZES["sliding_window"])
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)  # of layers without a window
    if factor != 1:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(factor)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, SIZES["num_hidden_layers"])
    for name, value in model.state_dict().items():
        if name != "lm_head.weight":  # the embedding
            value = value.numpy() + (1 if name.endswith("norm.weight") else 0)
            writer.add_tensor(names.get_name(name, (".weight",)), value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("factor", [1, 8.0])
def test_logits(factor, tmp_path):
    full = {"rope_type": "linear", "factor": factor} if factor != 1 else {"rope_type": "default"}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    rope = {"full_attention": {**full, "rope_theta": 1e6}, "sliding_attention": sliding}
    model = oracle.make_oracle("gemma3_text", {**SIZES, "rope_parameters": rope}, 97, "eager")
    write(tmp_path / "m.gguf", model, factor)
    tokens = np.arange(40).reshape(1, 40) % 97
    expected = oracle.logits_of(model, tokens)
    logits = np.array(load_model(tmp_path / "m.gguf")[0](mx.array(tokens)).astype(mx.float32))
    assert np.abs(logits - expected).max() < 1e-4 * np.abs(expected).max()
