"""GPT-OSS: experts with a clamped SwiGLU, attention sinks, and a sliding window in every second layer."""

from __future__ import annotations

from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.families.family import (
    COMMON_FIELDS,
    NUM_EXPERTS,
    Family,
    HFConfig,
    read_sliding_window,
    same_names,
    write_sliding_window,
)

_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_PARAMETERS = {"": "weight", "_bias": "bias", "_scales": "scales"}  # scales: see `checkpoint.quantized_formats`


def _read(values: HFConfig) -> dict[str, Any]:
    return {
        "moe_intermediate_size": values.get("intermediate_size"),
        **read_sliding_window(values, values.get("sliding_window", 128), lambda layer: layer % 2 == 0),
    }


def _mlx_lm_mismatch(config: ModelConfig) -> str | None:
    if config.quantization is None:
        return "only reads quantized experts"
    if (config.rope_scaling or {}).get("truncate", True) is False:
        return "rounds the bounds of YaRN, this model doesn't (truncate is false)"
    if (config.swiglu_limit, config.swiglu_alpha) != (7.0, 1.702):
        return "has swiglu_limit 7 and swiglu_alpha 1.702, this model others"
    return None


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    COMMON_FIELDS
    | same_names("num_key_value_heads", "rms_norm_eps", "rope_theta", "head_dim", "sliding_window", "attention_bias")
    | same_names("num_experts_per_tok", "swiglu_limit", "swiglu_alpha")
    | {"num_experts": NUM_EXPERTS[::-1]},
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "attention_bias": True,
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
    },
    fixed_values={"attention_sinks": True, "router_bias": True, "mlp_bias": True},
    read_extra=_read,
    write_extra=lambda config: write_sliding_window(config, 128),
    layer_modules={
        "mlp.router": "mlp.gate",
        **{f"mlp.experts.{name}": f"mlp.switch_mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")},  # mlx_lm
    },
    layer_tensors={
        f"mlp.experts.{name}{suffix}": " ".join(f"mlp.switch_mlp.{module}.{parameter}" for module in modules)
        for name, modules in _PROJECTIONS.items()
        for suffix, parameter in _PARAMETERS.items()
    },
    interleaved={f"mlp.experts.gate_up_proj{suffix}": "moe_intermediate_size" for suffix in _PARAMETERS},
    transposed=frozenset(f"mlp.experts.{name}" for name in _PROJECTIONS),
    mlx_lm_mismatch=_mlx_lm_mismatch,
)
