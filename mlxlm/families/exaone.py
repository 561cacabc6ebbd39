"""EXAONE 3 and 3.5: Llama with other names."""

from mlxlm.families.family import LLAMA_FIELDS, Family, same_names

EXAONE = Family(
    "exaone",
    "ExaoneForCausalLM",
    LLAMA_FIELDS
    | same_names("head_dim", "attention_bias", "mlp_bias")
    | {
        "num_hidden_layers": ("num_hidden_layers", "num_layers"),
        "rms_norm_eps": ("rms_norm_eps", "layer_norm_epsilon"),
        "hidden_act": ("hidden_act", "activation_function"),
    },
    defaults={"num_key_value_heads": 8, "max_position_embeddings": 4096},
    write_extra=lambda c: {"num_layers": c.num_hidden_layers, "layer_norm_epsilon": c.rms_norm_eps},  # for mlx_lm
    prefix="transformer.",
    layers="h",
    top_modules={"wte": "embed_tokens", "ln_f": "norm"},
    layer_modules={
        "ln_1": "input_layernorm",
        "ln_2": "post_attention_layernorm",
        **{f"attn.attention.{name}_proj": f"self_attn.{name}_proj" for name in "qkv"},
        "attn.attention.out_proj": "self_attn.o_proj",
        "mlp.c_fc_0": "mlp.gate_proj",
        "mlp.c_fc_1": "mlp.up_proj",
        "mlp.c_proj": "mlp.down_proj",
    },
)
