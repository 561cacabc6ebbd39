"""BLOOM: ALiBi, and a norm after the embedding."""

from __future__ import annotations

from typing import Any

from mlxlm.families.family import (
    COMMON_FIELDS,
    GPT_VALUES,
    MEGATRON_MLP,
    QKV,
    Family,
    HFConfig,
    first_present,
    first_unexpected,
    four_times,
    same_names,
)


def _read_extra(values: HFConfig) -> dict[str, Any]:
    return {"intermediate_size": four_times(first_present(values, "hidden_size", "n_embed"))}


BLOOM = Family(
    "bloom",
    "BloomForCausalLM",
    {name: hf_name for name, hf_name in COMMON_FIELDS.items() if name != "intermediate_size"}
    | {
        "hidden_size": ("hidden_size", "n_embed"),
        "num_hidden_layers": ("n_layer", "num_hidden_layers"),
        "num_attention_heads": ("n_head", "num_attention_heads"),
        "max_position_embeddings": "seq_length",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    defaults={"tie_word_embeddings": True},
    fixed_values={
        **GPT_VALUES,
        "attention_bias": True,
        "mlp_bias": True,
        "positions": "alibi",
        "embedding_norm": True,
        "hidden_act": "gelu_pytorch_tanh",
    },
    read_extra=_read_extra,
    find_unsupported=lambda values: first_unexpected(values, apply_residual_connection_post_layernorm=False),
    prefix="transformer.",
    layers="h",
    top_modules={"word_embeddings": "embed_tokens", "word_embeddings_layernorm": "embed_layernorm", "ln_f": "norm"},
    layer_modules={
        **same_names("input_layernorm", "post_attention_layernorm"),
        "self_attention.query_key_value": QKV,
        "self_attention.dense": "self_attn.o_proj",
        **MEGATRON_MLP,
    },
    interleaved={"self_attention.query_key_value": "num_key_value_heads"},
)
