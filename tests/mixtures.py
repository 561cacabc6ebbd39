"""Small random models of architectures that only mlx_lm implements, as transformers saves them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxlm.tokenizer import Tokenizer
from tests.small_models import change_config

VOCABULARY = 320
_BASE = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 256, "head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}  # fmt: skip
_EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
_LINEAR = {
    "shared_expert_intermediate_size": 32, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
    "full_attention_interval": 2,
}  # fmt: skip
KINDS = {
    "granitemoe": {**_BASE, **_EXPERTS, "intermediate_size": 64, "tie_word_embeddings": True},
    "exaone_moe": {
        **_BASE, **_EXPERTS, "num_hidden_layers": 4, "sliding_window": 24, "num_shared_experts": 1,
    },
    "olmo_hybrid": {
        **_BASE, "num_hidden_layers": 4, "linear_num_value_heads": 2, "linear_num_key_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
}  # fmt: skip

NATIVE = {  # run by mlxlm's decoder
    "mixtral": {**_BASE, **_EXPERTS, "intermediate_size": 64},
    "qwen2_moe": {
        **_BASE,
        **_EXPERTS,
        "shared_expert_intermediate_size": 32,
    },
    "deepseek_v3": {
        **_BASE,
        "head_dim": 16,
        "kv_lora_rank": 32,
        "q_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
    "qwen3_next": {**_BASE, **_EXPERTS, **_LINEAR, "decoder_sparse_step": 1},
    "qwen3_5_moe_text": {**_BASE, **_EXPERTS, **_LINEAR},
    "lfm2": {**_BASE, "conv_L_cache": 3, "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "granitemoehybrid": {
        **_BASE,
        **_EXPERTS,
        "intermediate_size": 64,
        "shared_intermediate_size": 32,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "layer_types": ["mamba", "attention"],
    },
    "gemma4_text": {
        **_BASE,
        "num_hidden_layers": 3,
        "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "sliding_window": 24,
        "global_head_dim": 64,
        "rope_parameters": None,
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": VOCABULARY,
        "use_double_wide_mlp": True,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
    "gpt_oss": {**_BASE, **_EXPERTS, "intermediate_size": 64, "sliding_window": 24},
}


def write_mixture(folder: Path, kind: str, tokenizer: Tokenizer, dtype: str = "bfloat16", **changes) -> Path:
    """Write a model with random weights of this `model_type`, and a tokenizer with a chat template."""
    oracle = pytest.importorskip("tests.transformers_oracle", reason="the models are made by transformers")
    import torch

    made = oracle.make_oracle(kind, {**{**KINDS, **NATIVE}[kind], **changes}, VOCABULARY, "eager")
    made.to(getattr(torch, dtype)).save_pretrained(folder)
    change_config(folder, torch_dtype=dtype)
    tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}\n{% endfor %}")
    return folder
