"""GLM-4 (`glm`, and `glm4` with norms on the outputs of sublayers, too): partial rotary positions, interleaved.

GLM-4.5 (`glm4_moe`) has experts, and rotary positions that are not interleaved.
"""

from __future__ import annotations

from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.families.family import (
    EXPERTS,
    LLAMA_FIELDS,
    SHARED_EXPERTS,
    Family,
    HFConfig,
    first_unexpected,
    read_bool,
    read_first_dense_layers,
    read_shared_experts,
    same_names,
    unsupported_layer_types,
    write_first_dense_layers,
    write_shared_experts,
)

_FIELDS = LLAMA_FIELDS | same_names("head_dim", "attention_bias", "partial_rotary_factor")
_DEFAULTS = {
    "rms_norm_eps": 1.5625e-07,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
}
_MLP = {"mlp.gate_up_proj": "mlp.gate_proj mlp.up_proj"}


def _glm_mismatch(config: ModelConfig) -> str | None:
    factor = config.partial_rotary_factor
    return None if factor == 1 else f"rotates whole heads, this model {factor:g} of them"


GLM = Family(
    "glm",
    "GlmForCausalLM",
    _FIELDS,
    defaults=_DEFAULTS,
    fixed_values={"attention_out_bias": False},
    layer_modules=_MLP,
    rope_interleaved=True,
    mlx_lm_mismatch=_glm_mismatch,
)

GLM4 = Family(
    "glm4",
    "Glm4ForCausalLM",
    _FIELDS,
    defaults=_DEFAULTS,
    fixed_values={"attention_out_bias": False, "norm_placement": "both"},
    layer_modules={
        **_MLP,
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    },
    rope_interleaved=True,
)


def _read_glm4_moe(values: HFConfig) -> dict[str, Any]:
    return {
        "qk_norm": "head" if read_bool(values, "use_qk_norm", False) else None,
        **read_shared_experts(values, 1408, 1),
        **read_first_dense_layers(values, 1),
    }


def _unsupported_experts(values: HFConfig) -> str | None:
    return first_unexpected(values, topk_method="noaux_tc") or unsupported_layer_types(
        read_first_dense_layers(values, 1)
    )


def _write_glm4_moe(config: ModelConfig) -> dict[str, Any]:
    return {
        "use_qk_norm": config.qk_norm == "head",
        **write_shared_experts(config),
        **write_first_dense_layers(config),
        **({} if config.rope_scaling else {"rope_scaling": None}),  # which mlx_lm requires
    }


GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    LLAMA_FIELDS
    | same_names(
        "head_dim", "attention_bias", "partial_rotary_factor", "num_experts_per_tok", "moe_intermediate_size",
        "norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor",
    )
    | {"num_experts": ("n_routed_experts", "num_local_experts")},
    defaults={
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "partial_rotary_factor": 0.5,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
    },
    fixed_values={"router": "sigmoid", "attention_out_bias": False},
    read_extra=_read_glm4_moe,
    write_extra=_write_glm4_moe,
    find_unsupported=_unsupported_experts,
    layer_modules={**EXPERTS, **SHARED_EXPERTS},
    has_mtp_layers=True,
)  # fmt: skip
