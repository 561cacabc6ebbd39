"""Configurations that llama.cpp runs, runs differently, or does not run."""

from __future__ import annotations

import pytest

from mlxlm.checkpoint import gguf
from mlxlm.checkpoint.gguf.writer import architecture_for
from mlxlm.families import config_from_hf
from mlxlm.utils.errors import CheckpointError
from tests.checkpoint.gguf.gguf_models import random_model, tensors_of

UNSUPPORTED = {
    "llama": [{"hidden_act": "relu"}, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}],
    "qwen2": [{"head_dim": 32}],
    "gemma2": [{"query_pre_attn_scalar": 64}, {"attn_logit_softcapping": None}, {"layer_types": None}],
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
    assert any("beyond 64 tokens" in note for note in result.notes)
