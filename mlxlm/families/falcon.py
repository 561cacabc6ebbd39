"""Falcon: 7B (multi-query, one norm per layer), 40B (grouped heads, two norms) and RW (ALiBi)."""

from __future__ import annotations

from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.families.family import (
    COMMON_FIELDS,
    GPT_VALUES,
    MEGATRON_MLP,
    QKV,
    Family,
    HFConfig,
    first_present,
    four_times,
    read_bool,
    same_names,
)


def _read_extra(values: HFConfig) -> dict[str, Any]:
    """`new_decoder_architecture` (40B) means grouped heads, and by default two norms for the parallel sublayers.

    transformers rounds ALiBi's slopes, and their products with positions, to bfloat16; this decoder doesn't.
    """
    new = read_bool(values, "new_decoder_architecture", False)
    heads = first_present(values, "num_attention_heads", "n_head")
    if new:
        kv_heads = first_present(values, "num_kv_heads") or heads
    else:
        kv_heads = 1 if read_bool(values, "multi_query", True) else heads
    parallel = new or read_bool(values, "parallel_attn", True)
    two_norms = new and (first_present(values, "num_ln_in_parallel_attn") or 2) == 2
    biased = read_bool(values, "bias", False)
    hidden_size = first_present(values, "hidden_size", "n_embed")
    return {
        "num_key_value_heads": kv_heads,
        "intermediate_size": first_present(values, "ffn_hidden_size") or four_times(hidden_size),
        "parallel_residual": parallel,
        "shared_norm": parallel and not two_norms,
        "attention_bias": biased,
        "mlp_bias": biased,
        **({"positions": "alibi", "alibi_scaled": True} if read_bool(values, "alibi", False) else {}),
    }


def _has_two_norms(config: ModelConfig) -> bool:
    return config.parallel_residual and not config.shared_norm


def _write_extra(config: ModelConfig) -> dict[str, Any]:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    new = _has_two_norms(config) or kv_heads not in (1, heads)
    return {
        "new_decoder_architecture": new,
        "multi_query": kv_heads == 1,
        "num_kv_heads": kv_heads,
        "parallel_attn": config.parallel_residual,
        "num_ln_in_parallel_attn": (2 if _has_two_norms(config) else 1) if new else None,
        "bias": config.mlp_bias,
        "alibi": config.positions == "alibi",
    }


def _layer_norms(config: ModelConfig, for_mlx: bool = False) -> dict[str, str]:
    if _has_two_norms(config):
        return {"ln_attn": "input_layernorm", "ln_mlp": "post_attention_layernorm"}
    return same_names("input_layernorm", "post_attention_layernorm")


FALCON = Family(
    "falcon",
    "FalconForCausalLM",
    COMMON_FIELDS
    | {
        "hidden_size": ("hidden_size", "n_embed"),
        "num_hidden_layers": ("num_hidden_layers", "n_layer"),
        "num_attention_heads": ("num_attention_heads", "n_head"),
        "intermediate_size": "ffn_hidden_size",
        "rms_norm_eps": "layer_norm_epsilon",
        "hidden_act": "activation",
        "rope_theta": "rope_theta",
    },
    defaults={"hidden_act": "gelu", "tie_word_embeddings": True},
    fixed_values=GPT_VALUES,
    read_extra=_read_extra,
    write_extra=_write_extra,
    prefix="transformer.",
    layers="h",
    top_modules={"word_embeddings": "embed_tokens", "ln_f": "norm"},
    layer_modules={"self_attention.query_key_value": QKV, "self_attention.dense": "self_attn.o_proj", **MEGATRON_MLP},
    extra_layer_modules=_layer_norms,
    interleaved={"self_attention.query_key_value": "num_key_value_heads"},
)
