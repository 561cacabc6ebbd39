"""Qwen 2 (biased query, key and value projections) and Qwen 3 (query and key norms), dense and with experts.

Qwen3-Next and Qwen 3.5 have the gated delta rule in most layers, and gated attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.components import DENSE, FULL
from mlxlm.config.model_config import MAX_LAYERS
from mlxlm.families.family import (
    EXPERTS,
    FUSED_EXPERTS,
    LLAMA_FIELDS,
    NUM_EXPERTS,
    Family,
    HFConfig,
    first_unexpected,
    read_bool,
    read_mlp_layer_types,
    read_sliding_window,
    same_names,
    unsupported_layer_types,
    write_sliding_window,
)

_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32}


def _window(values: HFConfig) -> Any:
    return values.get("sliding_window", 4096) if read_bool(values, "use_sliding_window", False) else None


def _read_windows(values: HFConfig) -> dict[str, Any]:
    first = values.get("max_window_layers", 28)
    return read_sliding_window(values, _window(values), lambda layer: isinstance(first, int) and layer >= first)


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    windows = write_sliding_window(config)
    full = [layer_type == "full_attention" for layer_type in windows["layer_types"]]
    first = full.index(False) if False in full else len(full)
    return {**windows, "use_sliding_window": config.sliding_window is not None, "max_window_layers": first}


QWEN2 = Family(
    "qwen2",
    "Qwen2ForCausalLM",
    LLAMA_FIELDS | same_names("head_dim", "sliding_window"),
    defaults=_DEFAULTS,
    fixed_values={"attention_bias": True, "attention_out_bias": False},
    read_extra=_read_windows,
    write_extra=_write_windows,
    find_unsupported=lambda values: first_unexpected(values, use_mrope=False),
)

QWEN3 = Family(
    "qwen3",
    "Qwen3ForCausalLM",
    LLAMA_FIELDS | same_names("head_dim", "sliding_window", "attention_bias"),
    defaults={**_DEFAULTS, "head_dim": 128},
    fixed_values={"qk_norm": "head"},
    read_extra=_read_windows,
    write_extra=_write_windows,
)

_EXPERT_FIELDS: dict[str, str | tuple[str, ...]] = {
    "num_experts": NUM_EXPERTS,
    **same_names("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
}


def _read_dense_layers(values: HFConfig) -> dict[str, Any]:
    dense, step = values.get("mlp_only_layers") or [], values.get("decoder_sparse_step") or 1
    return read_mlp_layer_types(values, lambda layer: layer in dense or (layer + 1) % step != 0)


def _write_dense_layers(config: ModelConfig) -> dict[str, Any]:
    types = config.mlp_layer_types or ()
    dense = [layer for layer, layer_type in enumerate(types) if layer_type == DENSE]
    return {"mlp_only_layers": dense, "decoder_sparse_step": 1}


def _unsupported_experts(values: HFConfig) -> str | None:
    """Layers that can't be read, or none with experts."""
    dense, step = values.get("mlp_only_layers") or [], values.get("decoder_sparse_step") or 1
    if not isinstance(dense, list) or not isinstance(step, int) or step < 1:
        return f"such mlp_only_layers and decoder_sparse_step ({step!r})"
    return unsupported_layer_types(_read_dense_layers(values))


def _read_qwen2_moe(values: HFConfig) -> dict[str, Any]:
    last = values.get("max_window_layers", 28)
    windows = read_sliding_window(values, _window(values), lambda i: i % 2 == 0 and isinstance(last, int) and i < last)
    return {**windows, **_read_dense_layers(values), "attention_bias": read_bool(values, "qkv_bias", True)}


def _qwen2_moe_mismatch(config: ModelConfig) -> str | None:
    if config.mlp_layer_types is not None and DENSE in config.mlp_layer_types:
        return "has experts in every layer, this model not"
    return "has an output head, this model the embedding" if config.tie_word_embeddings else None


QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    {**QWEN2.fields, **_EXPERT_FIELDS, **same_names("shared_expert_intermediate_size")},
    defaults={
        **_DEFAULTS,
        "num_key_value_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "norm_topk_prob": False,
    },
    fixed_values={"attention_out_bias": False, "shared_expert_gate": True},
    read_extra=_read_qwen2_moe,
    write_extra=lambda c: {**_write_windows(c), **_write_dense_layers(c), "qkv_bias": c.attention_bias},
    find_unsupported=_unsupported_experts,
    layer_modules=EXPERTS,
    mlx_lm_mismatch=_qwen2_moe_mismatch,
)


_STACKS = {f"mlp.experts.{name}": tensors for name, tensors in FUSED_EXPERTS.items()}


def _read_qwen3_moe(values: HFConfig) -> dict[str, Any]:
    """That of Qwen3-VL always normalizes the scores."""
    is_vl = values.get("model_type") == "qwen3_vl_moe_text"
    scores = {"norm_topk_prob": True} if is_vl else {}
    return {"sliding_window": _window(values), **_read_dense_layers(values), **scores}


QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    {**QWEN3.fields, **_EXPERT_FIELDS},
    defaults={
        **_DEFAULTS,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
    },
    fixed_values=QWEN3.fixed_values,
    read_extra=_read_qwen3_moe,
    write_extra=lambda c: {**_write_dense_layers(c), "use_sliding_window": c.sliding_window is not None},
    find_unsupported=_unsupported_experts,
    layer_modules=EXPERTS,
    other_layer_tensors=_STACKS,  # Qwen3-VL
    transposed=frozenset(_STACKS),
)


_LINEAR = "linear_attention"


def _read_linear_layers(values: HFConfig) -> dict[str, Any]:
    types, count, interval = (
        values.get(name) for name in ("layer_types", "num_hidden_layers", "full_attention_interval")
    )
    if types is None and isinstance(count, int) and count <= MAX_LAYERS:
        interval = interval if isinstance(interval, int) and interval > 0 else 4
        types = [_LINEAR if (layer + 1) % interval else FULL for layer in range(count)]
    all_full = isinstance(types, list) and set(map(str, types)) == {FULL}
    return {"layer_types": None if all_full else types}


def _write_linear_layers(config: ModelConfig) -> dict[str, Any]:
    """mlx_lm reads the interval instead of the types."""
    types = list(config.layer_types or (FULL,) * config.num_hidden_layers)
    interval = types.index(FULL) + 1 if FULL in types else len(types)
    return {"layer_types": types, "full_attention_interval": interval}


def _linear_layers_mismatch(config: ModelConfig) -> str | None:
    types = config.layer_types or ()
    interval = types.index(FULL) + 1 if FULL in types else 0
    if all((kind == FULL) == ((layer + 1) % interval == 0) for layer, kind in enumerate(types) if interval):
        return None
    return f"has attention in layers that are a multiple of {interval}, this model in others"


def _unsupported_linear_layers(values: HFConfig) -> str | None:
    return first_unexpected(values, hidden_act="silu", attn_output_gate=True)


_LINEAR_VALUES = {"qk_norm": "head", "norm_unit_offset": True, "attn_output_gate": True}
_LINEAR_MODULES = {
    "self_attn.q_proj": "self_attn.q_proj self_attn.gate_proj",
    **same_names("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"),
}

QWEN3_5 = Family(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    LLAMA_FIELDS
    | same_names(
        "head_dim", "attention_bias", "layer_types", "partial_rotary_factor",
        "linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim",
        "linear_conv_kernel_dim",
    ),
    defaults={
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    fixed_values=_LINEAR_VALUES,
    read_extra=_read_linear_layers,
    write_extra=_write_linear_layers,
    find_unsupported=_unsupported_linear_layers,
    multimodal_type="qwen3_5",
    other_prefixes=("", "model.language_model."),
    layer_modules={
        **_LINEAR_MODULES,
        "linear_attn.in_proj_qkv": " ".join(f"linear_attn.in_proj_{name}" for name in "qkv"),
    },
    interleaved={"self_attn.q_proj": "num_attention_heads"},
    mlx_lm_mismatch=_linear_layers_mismatch,
    mlx_lm_adds_one=True,
    ignored_prefixes=("mtp.",),
)  # fmt: skip

QWEN3_5_MOE = replace(
    QWEN3_5,
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    fields={
        **QWEN3_5.fields,
        "num_experts": NUM_EXPERTS,
        **same_names("num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"),
    },
    defaults={
        **QWEN3_5.defaults,
        "intermediate_size": 5632,  # of no layer
        "num_key_value_heads": 2,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    fixed_values={**_LINEAR_VALUES, "shared_expert_gate": True},
    multimodal_type="qwen3_5_moe",
    layer_modules={**QWEN3_5.layer_modules, **EXPERTS},
    layer_tensors=_STACKS,
)

QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    {**QWEN3_5.fields, **_EXPERT_FIELDS, **same_names("shared_expert_intermediate_size")},
    defaults={
        **QWEN3_5_MOE.defaults,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
    fixed_values=QWEN3_5_MOE.fixed_values,
    read_extra=lambda values: {**_read_linear_layers(values), **_read_dense_layers(values)},
    write_extra=lambda config: {**_write_linear_layers(config), **_write_dense_layers(config)},
    find_unsupported=lambda values: _unsupported_linear_layers(values) or _unsupported_experts(values),
    layer_modules={
        **_LINEAR_MODULES,
        **EXPERTS,
        "linear_attn.in_proj_qkvz": " ".join(f"linear_attn.in_proj_{name}" for name in "qkvz"),
        "linear_attn.in_proj_ba": "linear_attn.in_proj_b linear_attn.in_proj_a",
    },
    interleaved={
        "self_attn.q_proj": "num_attention_heads",
        "linear_attn.in_proj_qkvz": "linear_num_key_heads",
        "linear_attn.in_proj_ba": "linear_num_key_heads",
    },
    mlx_lm_mismatch=_linear_layers_mismatch,
    mlx_lm_adds_one=True,
    ignored_prefixes=("mtp.",),
)
