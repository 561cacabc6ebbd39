"""Gemma, Gemma 2 and Gemma 3.

Gemma scales embeddings and stores RMSNorm weights minus 1. Gemma 2 has soft caps and alternating windows; Gemma 3 norms
of queries and keys, and another RoPE in layers with windows.
"""

from __future__ import annotations

from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.families.family import (
    LLAMA_FIELDS,
    Family,
    HFConfig,
    first_unexpected,
    read_sliding_window,
    read_sliding_window_pattern,
    same_names,
    write_sliding_window,
)

_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "head_dim": 256, "tie_word_embeddings": True}


def _read_gemma(values: HFConfig) -> dict[str, Any]:
    """Embeddings are multiplied by sqrt(hidden_size). "gelu" in Gemma's first files means the tanh approximation."""
    size = values.get("hidden_size")
    multiplier = {"embedding_multiplier": size**0.5} if isinstance(size, int) and 0 < size < 2**31 else {}
    activation = values.get("hidden_activation") or values.get("hidden_act") or "gelu"
    return multiplier | {"hidden_act": "gelu_pytorch_tanh" if activation == "gelu" else activation}


def _write_gemma(config: ModelConfig) -> dict[str, Any]:
    return {"hidden_act": config.hidden_act, "hidden_activation": config.hidden_act}


def _read_gemma2(values: HFConfig) -> dict[str, Any]:
    window = values.get("sliding_window", 4096)
    return _read_gemma(values) | read_sliding_window(values, window, lambda layer: layer % 2 == 0)


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    """In transformers, `query_pre_attn_scalar` is an integer and never null."""
    scalar = config.query_pre_attn_scalar or config.head_dim
    scalar = int(scalar) if float(scalar).is_integer() else scalar
    return {**_write_gemma(config), **write_sliding_window(config, 4096), "query_pre_attn_scalar": scalar}


def _read_gemma3(values: HFConfig) -> dict[str, Any]:
    return _read_gemma(values) | read_sliding_window_pattern(values, default_window=4096, default_pattern=6)


def _find_unsupported(values: HFConfig) -> str | None:
    return first_unexpected(values, use_bidirectional_attention=False)


GEMMA = Family(
    "gemma",
    "GemmaForCausalLM",
    LLAMA_FIELDS | same_names("head_dim", "attention_bias"),
    defaults={**_DEFAULTS, "num_key_value_heads": 16},
    fixed_values={"norm_unit_offset": True},
    read_extra=_read_gemma,
    write_extra=_write_gemma,
    find_unsupported=_find_unsupported,
)

GEMMA2 = Family(
    "gemma2",
    "Gemma2ForCausalLM",
    LLAMA_FIELDS
    | same_names("head_dim", "sliding_window", "attention_bias")
    | same_names("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    defaults={
        **_DEFAULTS,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    fixed_values={"norm_unit_offset": True, "norm_placement": "both"},
    read_extra=_read_gemma2,
    write_extra=_write_windows,
    find_unsupported=_find_unsupported,
)

GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    GEMMA2.fields,
    defaults={
        **_DEFAULTS,
        # transformers' sizes, which models with images leave out.
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "query_pre_attn_scalar": 256,
    },
    fixed_values={**GEMMA2.fixed_values, "qk_norm": "head"},
    has_local_rope=True,
    read_extra=_read_gemma3,
    write_extra=_write_windows,
    find_unsupported=_find_unsupported,
)
