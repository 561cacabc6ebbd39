"""Qwen 2 (biased query, key and value projections) and Qwen 3 (query and key norms), dense and with experts."""

from __future__ import annotations

from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.components import DENSE
from mlxlm.families.family import (
    EXPERTS,
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
)


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
    read_extra=lambda values: {"sliding_window": _window(values), **_read_dense_layers(values)},
    write_extra=lambda c: {**_write_dense_layers(c), "use_sliding_window": c.sliding_window is not None},
    find_unsupported=_unsupported_experts,
    layer_modules=EXPERTS,
)
