"""Code World Model: Llama 3 with sliding windows in three of four layers."""

from __future__ import annotations

from typing import Any

from mlxlm.families.family import (
    LLAMA_FIELDS,
    Family,
    HFConfig,
    read_sliding_window,
    same_names,
    write_sliding_window,
)


def _read(values: HFConfig) -> dict[str, Any]:
    return read_sliding_window(values, values.get("sliding_window", 8192) or None, lambda layer: layer % 4 != 0)


CWM = Family(
    "cwm",
    "CwmForCausalLM",
    LLAMA_FIELDS | same_names("head_dim", "mlp_bias", "sliding_window"),
    defaults={"max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128},
    read_extra=_read,
    write_extra=write_sliding_window,
)
