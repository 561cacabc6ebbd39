"""Cohere (Command R) and Cohere 2 (Command A, R7B): LayerNorm without bias, parallel sublayers, interleaved RoPE."""

from __future__ import annotations

from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.numbers import is_positive
from mlxlm.families.family import (
    COMMON_FIELDS,
    Family,
    HFConfig,
    inverse,
    read_bool,
    read_sliding_window_pattern,
    rope_in_windows,
    same_names,
    write_sliding_window,
)

_FIELDS = (
    COMMON_FIELDS
    | same_names("num_key_value_heads", "hidden_act", "rope_theta", "attention_bias")
    | {"rms_norm_eps": "layer_norm_eps"}
)
_DEFAULTS = {"max_position_embeddings": 8192, "tie_word_embeddings": True}
_FIXED = {"norm": "layer_no_bias", "parallel_residual": True, "shared_norm": True}


def _read_cohere(values: HFConfig) -> dict[str, Any]:
    return {**_read_scale(values), "qk_norm": "layer_per_head" if read_bool(values, "use_qk_norm", False) else None}


def _read_scale(values: HFConfig) -> dict[str, Any]:
    scale = values.get("logit_scale", 0.0625)
    return {"logits_scaling": inverse(scale) if is_positive(scale) else scale}


def _write_scale(config: ModelConfig) -> dict[str, Any]:
    return {"logit_scale": inverse(config.logits_scaling)}


def _read_cohere2(values: HFConfig) -> dict[str, Any]:
    windows = read_sliding_window_pattern(values, default_window=4096, default_pattern=4)
    return {**_read_scale(values), **windows, "rope_layers": rope_in_windows(values, windows)}


COHERE = Family(
    "cohere",
    "CohereForCausalLM",
    _FIELDS,
    defaults=_DEFAULTS,
    fixed_values=_FIXED,
    read_extra=_read_cohere,
    write_extra=lambda config: {**_write_scale(config), "use_qk_norm": config.qk_norm is not None},
    layer_modules=same_names("self_attn.q_norm", "self_attn.k_norm"),
    rope_interleaved=True,
)

COHERE2 = Family(
    "cohere2",
    "Cohere2ForCausalLM",
    _FIELDS | same_names("head_dim", "sliding_window"),
    defaults=_DEFAULTS,
    fixed_values=_FIXED,
    read_extra=_read_cohere2,
    write_extra=lambda config: {**_write_scale(config), **write_sliding_window(config, 4096)},
    rope_interleaved=True,
)
