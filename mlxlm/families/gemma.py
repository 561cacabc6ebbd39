"""Gemma 1 to 4.

Gemma scales embeddings and stores RMSNorm weights minus 1. Gemma 2 has soft caps and alternating windows; Gemma 3 norms
of queries and keys, and another RoPE in layers with windows. In Gemma 4 layers with full attention have larger heads,
the last layers read the keys and values of others, and small models have an input for each layer; RMSNorm weights are
as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.components import FULL, SLIDING
from mlxlm.config.model_config import MAX_LAYERS
from mlxlm.config.numbers import is_count
from mlxlm.families.family import (
    FUSED_EXPERTS,
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
    values = {**GEMMA3.defaults, **values}
    return _read_gemma(values) | read_sliding_window_pattern(values, default_window=4096, default_pattern=6)


def _read_gemma4(values: HFConfig) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if values.get("model_type") == "gemma4_unified_text":  # has other defaults
        values = {"sliding_window": 1024, "hidden_size_per_layer_input": 0, **values}
        result["max_position_embeddings"] = values.get("max_position_embeddings", 262_144)
    values = {**_GEMMA4_SIZES, "sliding_window": 512, "hidden_size_per_layer_input": 256, **values}
    count, types = values["num_hidden_layers"], values.get("layer_types")
    if types is None and is_count(count) and count <= MAX_LAYERS:
        types = [FULL if layer % 6 == 0 else SLIDING for layer in range(1, count + 1)]
    if isinstance(types, list | tuple):
        types = [*types[:-1], FULL]  # as in transformers
    result |= read_sliding_window({**values, "layer_types": types}, values["sliding_window"])
    size = values["hidden_size_per_layer_input"] or None
    rows = values.get("vocab_size_per_layer_input", 262_144) if size else None
    result |= {"hidden_size_per_layer_input": size, "vocab_size_per_layer_input": rows}
    if not values.get("enable_moe_block"):
        result |= dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size"))
    return {**_read_gemma(values), **result, **_read_global_heads(values)}


def _read_global_heads(values: HFConfig) -> dict[str, Any]:
    """Size and number of heads with full attention. transformers 5.24 writes what differs in each such layer."""
    layers = values.get("per_layer_config")
    if isinstance(layers, Mapping):
        layer = next(iter(layers.values()), None)
        size, heads = (
            map(layer.get, ("head_dim", "num_key_value_heads")) if isinstance(layer, Mapping) else (None, None)
        )
    else:
        size, heads = values.get("global_head_dim", 512), values.get("num_global_key_value_heads")
        heads = heads if values.get("attention_k_eq_v") else None
    return {"global_head_dim": size, "num_global_key_value_heads": heads}


def _write_gemma4(config: ModelConfig) -> dict[str, Any]:
    return {
        **_write_gemma(config),
        **write_sliding_window(config, 512),
        "global_head_dim": config.global_head_dim or config.head_dim,
        "hidden_size_per_layer_input": config.hidden_size_per_layer_input or 0,
        "vocab_size_per_layer_input": config.vocab_size_per_layer_input or config.vocab_size,
    }


def _unsupported_gemma4(values: HFConfig) -> str | None:
    is_vision = values.get("use_bidirectional_attention") == "vision"  # among the tokens of an image
    return None if is_vision else _find_unsupported(values)


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

_GEMMA4_SIZES = {"vocab_size": 262_144, "hidden_size": 2304, "num_hidden_layers": 30}
_STACKS = {
    f"experts.{name}": " ".join(f"experts.{tensor.removeprefix('mlp.')}" for tensor in tensors.split())
    for name, tensors in FUSED_EXPERTS.items()
}

GEMMA4 = Family(
    "gemma4_text",
    "Gemma4ForCausalLM",
    {
        **LLAMA_FIELDS,
        **same_names(
            "head_dim", "attention_bias", "sliding_window", "global_head_dim", "num_global_key_value_heads",
            "attention_k_eq_v", "num_kv_shared_layers", "use_double_wide_mlp", "final_logit_softcapping",
            "hidden_size_per_layer_input", "vocab_size_per_layer_input", "enable_moe_block", "num_experts",
            "moe_intermediate_size",
        ),
        "num_experts_per_tok": "top_k_experts",
    },
    defaults={**GEMMA3.defaults, **_GEMMA4_SIZES},
    fixed_values={
        "norm_placement": "both",
        "qk_norm": "head",
        "value_norm": True,
        "query_pre_attn_scalar": 1,
        "layer_scalar": True,
    },
    has_local_rope=True,
    read_extra=_read_gemma4,
    write_extra=_write_gemma4,
    find_unsupported=_unsupported_gemma4,
    mlx_lm_mismatch=lambda config: "lacks biases of attention" if config.attention_bias else None,
    top_modules=same_names(
        "embed_tokens", "norm", "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"
    ),
    layer_modules={
        "router.proj": "experts.gate",
        "router.scale": "experts.router_scale",
        "router.per_expert_scale": "experts.per_expert_scale",
        **{f"experts.switch_glu.{name}_proj": f"experts.switch_mlp.{name}_proj" for name in ("gate", "up", "down")},
    },
    layer_tensors=_STACKS,
)  # fmt: skip
