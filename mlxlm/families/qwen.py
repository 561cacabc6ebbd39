"""Qwen 2 (biased query, key and value projections) and Qwen 3 (query and key norms)."""

from __future__ import annotations

from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.families.family import (
    LLAMA_FIELDS,
    Family,
    HFConfig,
    first_unexpected,
    read_bool,
    read_sliding_window,
    same_names,
    write_sliding_window,
)

_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32}


def _read_windows(values: HFConfig) -> dict[str, Any]:
    window = values.get("sliding_window", 4096) if read_bool(values, "use_sliding_window", False) else None
    first = values.get("max_window_layers", 28)
    return read_sliding_window(values, window, lambda layer: isinstance(first, int) and layer >= first)


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
