"""Granite: multipliers of embeddings, attention scores, residual and logits."""

from __future__ import annotations

from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.numbers import is_count, is_positive
from mlxlm.families.family import LLAMA_FIELDS, Family, HFConfig, inverse, same_names


def _read(values: HFConfig) -> dict[str, Any]:
    """Scores are multiplied by `attention_multiplier`, in other models by head_dim^-0.5."""
    multiplier = values.get("attention_multiplier", 1.0)
    if not is_positive(multiplier):
        return {"query_pre_attn_scalar": multiplier}
    scalar, hidden, heads = inverse(multiplier**2), values.get("hidden_size"), values.get("num_attention_heads")
    is_usual = is_count(hidden) and is_count(heads) and scalar == hidden // heads
    return {} if is_usual else {"query_pre_attn_scalar": scalar}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"attention_multiplier": (config.query_pre_attn_scalar or config.head_dim) ** -0.5}


GRANITE = Family(
    "granite",
    "GraniteForCausalLM",
    LLAMA_FIELDS
    | same_names("attention_bias", "mlp_bias", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    defaults={"rms_norm_eps": 1e-6},
    read_extra=_read,
    write_extra=_write,
)
