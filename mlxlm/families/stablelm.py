"""StableLM: LayerNorm and partial rotary positions."""

from __future__ import annotations

from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.families.family import COMMON_FIELDS, Family, HFConfig, read_bool, same_names


def _read(values: HFConfig) -> dict[str, Any]:
    """Parallel sublayers share a norm."""
    parallel = read_bool(values, "use_parallel_residual", False)
    qk_norm = "layer_per_head" if read_bool(values, "qk_layernorm", False) else None
    return {"parallel_residual": parallel, "shared_norm": parallel, "qk_norm": qk_norm}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {"use_parallel_residual": config.parallel_residual, "qk_layernorm": config.qk_norm is not None}


STABLELM = Family(
    "stablelm",
    "StableLmForCausalLM",
    COMMON_FIELDS
    | same_names("num_key_value_heads", "hidden_act", "rope_theta", "partial_rotary_factor")
    | {"rms_norm_eps": "layer_norm_eps", "attention_bias": "use_qkv_bias"},
    defaults={"max_position_embeddings": 4096, "num_key_value_heads": 32, "partial_rotary_factor": 0.25},
    fixed_values={"norm": "layer", "attention_out_bias": False},
    read_extra=_read,
    write_extra=_write,
    layer_modules={f"self_attn.{x}_layernorm.norms.*": f"self_attn.{x}_norm" for x in "qk"},
)
