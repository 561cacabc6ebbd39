"""Phi-3: Llama with fused projections and longrope."""

from __future__ import annotations

from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.families.family import LLAMA_FIELDS, QKV, Family, same_names


def _write_extra(config: ModelConfig) -> dict[str, Any]:
    name, scaling = "original_max_position_embeddings", config.rope_scaling or {}  # outside rope_scaling
    return {name: scaling[name]} if name in scaling else {}


PHI3 = Family(
    "phi3",
    "Phi3ForCausalLM",
    LLAMA_FIELDS | same_names("head_dim", "sliding_window", "partial_rotary_factor"),
    defaults={"max_position_embeddings": 4096},
    write_extra=_write_extra,
    layer_modules={"self_attn.qkv_proj": QKV, "mlp.gate_up_proj": "mlp.gate_proj mlp.up_proj"},
)
