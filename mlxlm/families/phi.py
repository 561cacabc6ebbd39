"""Phi 1, 1.5 and 2: parallel sublayers that share a LayerNorm, partial rotary positions, and biases everywhere."""

from mlxlm.families.family import COMMON_FIELDS, GPT_VALUES, Family, first_unexpected, same_names

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
    find_unsupported=lambda values: first_unexpected(values, qk_layernorm=False),
    top_modules={"embed_tokens": "embed_tokens", "final_layernorm": "norm"},
    layer_modules={
        "self_attn.dense": "self_attn.o_proj",
        "mlp.fc1": "mlp.up_proj",
        "mlp.fc2": "mlp.down_proj",
    },
)
