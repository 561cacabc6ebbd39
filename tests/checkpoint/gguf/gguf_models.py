"""A small model of each family that llama.cpp has."""

from __future__ import annotations

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.families import config_from_hf
from mlxlm.model import Decoder
from tests.small_models import arrays_of, random_decoder

VOCAB = 307  # seven rows more than the tokenizer has tokens
_COMMON = {
    "model_type": "llama",
    "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": VOCAB, "max_position_embeddings": 128,
}  # fmt: skip
_FALCON = {
    "model_type": "falcon", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": VOCAB,
    "bias": False, "alibi": False,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LONGROPE = {
    "rope_type": "longrope", "original_max_position_embeddings": 32,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
}  # fmt: skip
_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2}
_LATENT = {
    **_COMMON, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 64, "qk_rope_head_dim": 16,
    "v_head_dim": 48, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 2, "first_k_dense_replace": 1,
    "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip
_HYBRID = {
    **_COMMON, **_EXPERTS, "head_dim": 32, "full_attention_interval": 2, "linear_num_value_heads": 6,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "partial_rotary_factor": 0.25,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
}  # fmt: skip
_MAMBA = {
    **_COMMON, "model_type": "granitemoehybrid", "layer_types": ["mamba", "attention", "mamba"], "mamba_n_heads": 8,
    "mamba_d_head": 16, "mamba_d_state": 16,
}  # fmt: skip
_NEMOTRON = {
    **_COMMON, "model_type": "nemotron_h", "mamba_num_heads": 8, "mamba_head_dim": 12, "n_groups": 2,
    "ssm_state_size": 16, "head_dim": 32,
}  # fmt: skip
_CONVOLUTIONS = {**_COMMON, "layer_types": ["conv", "full_attention", "conv"], "tie_word_embeddings": True}
_LARGE = {
    **_COMMON, "hidden_size": 32, "num_hidden_layers": 64, "num_key_value_heads": 1, "num_attention_heads": 2,
    "intermediate_size": 32,
}  # fmt: skip
_GEMMA4 = {
    **_COMMON, "model_type": "gemma4_text", "num_hidden_layers": 6, "sliding_window": 16, "head_dim": 32,
    "global_head_dim": 64, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "tie_word_embeddings": True, "final_logit_softcapping": 30.0, "vocab_size_per_layer_input": VOCAB,
}  # fmt: skip
_WINDOWS = {**_COMMON, "num_hidden_layers": 5, "sliding_window": 16}
MODELS = {
    "llama": _COMMON,
    "llama-biases": {**_COMMON, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 32},
    "llama-3": {**_COMMON, "rope_theta": 500_000.0, "rope_scaling": _LLAMA3},
    "llama-linear": {**_COMMON, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "mistral": {**_COMMON, "model_type": "mistral", "sliding_window": 64, "head_dim": 32},
    "ministral3": {
        **_COMMON, "model_type": "ministral3", "head_dim": 32,
        "rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5},
    },
    "qwen2": {**_COMMON, "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2-yarn": {**_COMMON, "model_type": "qwen2", "rope_scaling": _YARN},
    "qwen3": {**_COMMON, "model_type": "qwen3", "head_dim": 32},
    "gemma": {**_COMMON, "model_type": "gemma", "head_dim": 32, "tie_word_embeddings": True},
    "gemma2": {
        **_COMMON, "model_type": "gemma2", "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 16,
        "tie_word_embeddings": True,
    },
    "gemma3": {
        **_WINDOWS, "model_type": "gemma3_text", "num_hidden_layers": 7, "head_dim": 32, "query_pre_attn_scalar": 32,
        "tie_word_embeddings": True, "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "gemma4": {
        **_GEMMA4, "hidden_size_per_layer_input": 32, "num_kv_shared_layers": 3, "use_double_wide_mlp": True,
    },
    "gemma4-keys": {
        **_GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e3},
        },
    },
    "gemma4-moe": {
        **_GEMMA4, "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 5, "top_k_experts": 2,
        "moe_intermediate_size": 32, "tie_word_embeddings": False,
    },
    "olmo2": {**_COMMON, "model_type": "olmo2"},
    "olmo3": {**_WINDOWS, "model_type": "olmo3"},
    "minimax-m2": {**_COMMON, **_EXPERTS, "model_type": "minimax_m2", "head_dim": 32, "rotary_dim": 16},
    "dots1": {
        **_LATENT, "model_type": "dots1", "head_dim": 32, "n_group": 1, "topk_group": 1, "rope_scaling": None,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "sliding_window": None,
    },
    "llama4": {
        **_COMMON, **_EXPERTS, "model_type": "llama4_text", "num_hidden_layers": 6, "head_dim": 32,
        "intermediate_size": 32, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2,
        "rope_scaling": {**_LLAMA3, "high_freq_factor": 1.0},
    },
    "command-r": {**_COMMON, "model_type": "cohere"},
    "cohere2": {**_WINDOWS, "model_type": "cohere2", "logit_scale": 0.25},
    "glm4": {**_COMMON, "model_type": "glm4", "head_dim": 32},
    "glm": {**_COMMON, "model_type": "glm", "head_dim": 16},
    "exaone": {**_COMMON, "model_type": "exaone", "rope_scaling": _LLAMA3},
    "exaone4": {**_COMMON, "model_type": "exaone4", "sliding_window": None},
    "stablelm": {**_COMMON, "model_type": "stablelm", "use_qkv_bias": True},
    "stablelm-12b": {**_COMMON, "model_type": "stablelm", "use_parallel_residual": True, "qk_layernorm": True},
    "ernie4_5": {**_COMMON, "model_type": "ernie4_5", "head_dim": 32},
    "seed-oss": {**_COMMON, "model_type": "seed_oss", "head_dim": 32},
    "olmo": {**_COMMON, "model_type": "olmo", "clip_qkv": 0.5},
    "smollm3": {**_COMMON, "model_type": "smollm3", "num_hidden_layers": 5, "tie_word_embeddings": True},
    "granite": {
        **_COMMON, "model_type": "granite", "attention_multiplier": 0.3, "embedding_multiplier": 1.5,
        "residual_multiplier": 0.7, "logits_scaling": 3.0,
    },
    "granite-4": {
        **_MAMBA, "attention_multiplier": 0.3, "embedding_multiplier": 1.5, "residual_multiplier": 0.7,
        "logits_scaling": 3.0, "num_local_experts": 0, "shared_intermediate_size": 96, "tie_word_embeddings": True,
    },
    "granite-4-moe": {
        **_MAMBA, "num_local_experts": 5, "num_experts_per_tok": 2, "shared_intermediate_size": 64, "mamba_n_groups": 2,
        "attention_bias": False,
    },
    "nemotron-h": {**_NEMOTRON, "hybrid_override_pattern": "M-*M-*-"},
    "nemotron-3": {
        **_NEMOTRON, "hybrid_override_pattern": "M*EME", "intermediate_size": 32, "n_routed_experts": 5,
        "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 64, "routed_scaling_factor": 1.5,
    },
    "lfm2": {**_CONVOLUTIONS, "model_type": "lfm2", "block_auto_adjust_ff_dim": False, "conv_L_cache": 4},
    "lfm2-moe": {
        **_CONVOLUTIONS, **_EXPERTS, "model_type": "lfm2_moe", "moe_intermediate_size": 32, "num_dense_layers": 1,
    },
    "mixtral": {**_COMMON, "model_type": "mixtral", "num_local_experts": 4, "head_dim": 32},
    "qwen3-moe": {
        **_COMMON, **_EXPERTS, "model_type": "qwen3_moe", "moe_intermediate_size": 32, "norm_topk_prob": True,
    },
    "qwen2-moe": {
        **_COMMON, **_EXPERTS, "model_type": "qwen2_moe", "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "qwen3-next": {**_HYBRID, "model_type": "qwen3_next", "norm_topk_prob": True},
    "qwen3.5": {**_HYBRID, "model_type": "qwen3_5_text", "tie_word_embeddings": True},
    "qwen3.5-moe": {
        **_HYBRID, "model_type": "qwen3_5_moe_text", "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    },
    "glm4-moe": {
        **_LATENT, "model_type": "glm4_moe", "num_key_value_heads": 2, "head_dim": 32, "n_group": 1, "topk_group": 1,
        "use_qk_norm": True, "attention_bias": True, "rope_scaling": None,
    },
    "olmoe": {**_COMMON, **_EXPERTS, "model_type": "olmoe", "num_key_value_heads": 4},
    "deepseek-v3": {**_LATENT, "model_type": "deepseek_v3", "q_lora_rank": 32, "n_group": 2, "topk_group": 1},
    "deepseek-v2-lite": {**_LATENT, "model_type": "deepseek_v2", "q_lora_rank": None},
    "gpt-oss": {
        **_COMMON, "model_type": "gpt_oss", "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "gpt-oss-yarn": {
        **_COMMON, "model_type": "gpt_oss", "head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 16, "rope_scaling": {**_YARN, "truncate": False},
    },
    "arcee": {**_COMMON, "model_type": "arcee"},
    "starcoder2": {**_COMMON, "model_type": "starcoder2"},
    "phi2": {**_COMMON, "model_type": "phi", "partial_rotary_factor": 0.5},
    "phi3": {**_COMMON, "model_type": "phi3"},
    "phi3-partial": {**_COMMON, "model_type": "phi3", "partial_rotary_factor": 0.5},
    "phi3-longrope": {**_COMMON, "model_type": "phi3", "rope_scaling": _LONGROPE},
    "gpt2": {
        "model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": VOCAB,
    },
    "bloom": {"model_type": "bloom", "hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": VOCAB},
    "gpt-neox": {
        "model_type": "gpt_neox", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
        "intermediate_size": 96, "vocab_size": VOCAB, "rotary_pct": 0.5,
    },
    "falcon-7b": _FALCON,
    "falcon-40b": {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True},
    "falcon-11b": {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
}  # fmt: skip
# Models that llama.cpp recognizes by their 64 layers.
LARGE_MODELS = {
    "command-r-plus": {**_LARGE, "model_type": "cohere", "use_qk_norm": True},
    "exaone4-32b": {**_LARGE, "model_type": "exaone4", "sliding_window": 16},
}


def random_model(name: str, tokenizer) -> Decoder:
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    decoder = random_decoder(config_from_hf({**(MODELS | LARGE_MODELS)[name], **ids}))
    rng = np.random.default_rng(1)
    weights = []
    for key, value in arrays_of(decoder).items():
        value = np.array(value)
        value = 3 * value if value.ndim > 1 else value + rng.normal(size=value.shape) / 5
        weights.append((key, mx.array(value.astype(np.float32)).astype(mx.bfloat16).astype(mx.float32)))
    decoder.load_weights(weights)
    decoder.eval()
    return decoder
