"""Phi 1, 1.5 and 2: parallel sublayers that share a LayerNorm, partial rotary positions, and biases everywhere."""

from mlxlm.families.family import COMMON_FIELDS, GPT_VALUES, Family, read_bool, same_names

PHI = Family(
    "phi",
    "PhiForCausalLM",
    COMMON_FIELDS
    | same_names("num_key_value_heads", "hidden_act", "rope_theta", "partial_rotary_factor")
    | {"rms_norm_eps": "layer_norm_eps"},
    defaults={"hidden_act": "gelu_new", "partial_rotary_factor": 0.5},
    fixed_values={
        **GPT_VALUES,
        "parallel_residual": True,
        "shared_norm": True,
        "attention_bias": True,
        "mlp_bias": True,
        "head_bias": True,
    },
    read_extra=lambda values: {"qk_norm": "layer" if read_bool(values, "qk_layernorm", False) else None},
    write_extra=lambda config: {"qk_layernorm": config.qk_norm is not None},
    top_modules={"embed_tokens": "embed_tokens", "final_layernorm": "norm"},
    layer_modules={
        "self_attn.dense": "self_attn.o_proj",
        "self_attn.q_layernorm": "self_attn.q_norm",
        "self_attn.k_layernorm": "self_attn.k_norm",
        "mlp.fc1": "mlp.up_proj",
        "mlp.fc2": "mlp.down_proj",
    },
    mlx_lm_mismatch=lambda config: "has no norms of queries and keys" if config.qk_norm else None,
)
