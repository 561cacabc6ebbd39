"""StableLM: LayerNorm and partial rotary positions."""

from __future__ import annotations

from typing import Any

from mlxlm.families.family import COMMON_FIELDS, Family, HFConfig, first_unexpected, read_bool, same_names


def _read(values: HFConfig) -> dict[str, Any]:
    """Parallel sublayers share a norm."""
    parallel = read_bool(values, "use_parallel_residual", False)
    return {"parallel_residual": parallel, "shared_norm": parallel}


STABLELM = Family(
    "stablelm",
    "StableLmForCausalLM",
    COMMON_FIELDS
    | same_names("num_key_value_heads", "hidden_act", "rope_theta", "partial_rotary_factor")
    | {"rms_norm_eps": "layer_norm_eps", "attention_bias": "use_qkv_bias"},
    defaults={"max_position_embeddings": 4096, "num_key_value_heads": 32, "partial_rotary_factor": 0.25},
    fixed_values={"norm": "layer", "attention_out_bias": False},
    read_extra=_read,
    write_extra=lambda config: {"use_parallel_residual": config.parallel_residual},
    find_unsupported=lambda values: first_unexpected(values, qk_layernorm=False),
)
