"""GPT-NeoX (Pythia): parallel residual, partial rotary positions, LayerNorm."""

from mlxlm.families.family import COMMON_FIELDS, GPT_VALUES, MEGATRON_MLP, QKV, Family, same_names

GPT_NEOX = Family(
    "gpt_neox",
    "GPTNeoXForCausalLM",
    COMMON_FIELDS
    | same_names("hidden_act", "attention_bias")
    | {
        "rms_norm_eps": "layer_norm_eps",
        "parallel_residual": "use_parallel_residual",
        "rope_theta": "rotary_emb_base",
        "partial_rotary_factor": "rotary_pct",
    },
    defaults={"hidden_act": "gelu", "attention_bias": True, "parallel_residual": True, "partial_rotary_factor": 0.25},
    fixed_values={**GPT_VALUES, "mlp_bias": True},
    prefix="gpt_neox.",
    head="embed_out",
    top_modules={"embed_in": "embed_tokens", "final_layer_norm": "norm"},
    layer_modules={
        **same_names("input_layernorm", "post_attention_layernorm"),
        "attention.query_key_value": QKV,
        "attention.dense": "self_attn.o_proj",
        **MEGATRON_MLP,
    },
    interleaved={"attention.query_key_value": "num_key_value_heads"},
    mlx_lm_prefixes=(("gpt_neox.layers.", "model.h."), ("embed_out", "model.embed_out"), ("gpt_neox.", "model.")),
    ignored_suffixes=(".attention.bias", ".attention.masked_bias", ".attention.rotary_emb.inv_freq"),
)
