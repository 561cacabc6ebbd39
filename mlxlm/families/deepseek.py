"""DeepSeek V2 and V3: latent attention, and mixtures of experts after the first layers.

GLM-4.7-Flash (`glm4_moe_lite`) is like V3, with another list of the layers with experts.
"""

from __future__ import annotations

from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.components import DENSE, SPARSE
from mlxlm.families.family import (
    EXPERTS,
    LLAMA_FIELDS,
    SHARED_EXPERTS,
    Family,
    HFConfig,
    first_unexpected,
    read_first_dense_layers,
    read_shared_experts,
    same_names,
    unsupported_layer_types,
    write_first_dense_layers,
    write_shared_experts,
)

_FIELDS = LLAMA_FIELDS | same_names(
    "kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "attention_bias",
    "num_experts_per_tok", "moe_intermediate_size", "n_group", "topk_group", "routed_scaling_factor",
)  # fmt: skip
_V3_FIELDS: dict[str, str | tuple[str, ...]] = {
    **_FIELDS,
    "num_experts": ("n_routed_experts", "num_local_experts"),
    "norm_topk_prob": "norm_topk_prob",
}
_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def _read_v2(values: HFConfig) -> dict[str, Any]:
    has_groups = values.get("topk_method") == "group_limited_greedy"
    return {
        **read_shared_experts(values, 1407, 2),
        **read_first_dense_layers(values, 0),
        **({} if has_groups else {"n_group": 1, "topk_group": 1}),
    }


def _write(config: ModelConfig) -> dict[str, Any]:
    scaling = {} if config.rope_scaling else {"rope_scaling": None}  # which mlx_lm requires
    return {**write_shared_experts(config), **write_first_dense_layers(config), **scaling}


def _mismatch(config: ModelConfig) -> str | None:
    if config.num_experts is not None and config.shared_expert_intermediate_size is None:
        return "needs a shared expert"
    if config.model_type == "deepseek_v2" and config.rope_scaling is None:
        return "needs a RoPE scaling"
    return None


DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    _FIELDS | {"num_experts": ("n_routed_experts", "num_experts")},
    defaults={**_DEFAULTS, "num_experts": 64, "moe_intermediate_size": 1407},
    fixed_values={"router": "softmax", "norm_topk_prob": False},
    read_extra=_read_v2,
    write_extra=lambda c: {**_write(c), "topk_method": "greedy" if c.n_group == 1 else "group_limited_greedy"},
    find_unsupported=lambda values: (
        first_unexpected(values, scoring_func="softmax", norm_topk_prob=False, moe_layer_freq=1, mlp_bias=False)
        or _unexpected_topk_method(values)
        or unsupported_layer_types(read_first_dense_layers(values, 0))
    ),
    layer_modules={**EXPERTS, **SHARED_EXPERTS},
    fused_kv_b=("transformers", "mlx_lm"),
    mlx_lm_mismatch=_mismatch,
)


def _unexpected_topk_method(values: HFConfig) -> str | None:
    method = values.get("topk_method")
    return None if method in (None, "greedy", "group_limited_greedy") else f"topk_method {method!r}"


def _unsupported_v3(values: HFConfig) -> str | None:
    return first_unexpected(
        values, scoring_func="sigmoid", topk_method="noaux_tc", moe_layer_freq=1, rope_interleave=True
    )


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _V3_FIELDS,
    defaults={
        **_DEFAULTS,
        "max_position_embeddings": 4096,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
    },
    fixed_values={"router": "sigmoid"},
    read_extra=lambda values: {**read_shared_experts(values, 2048, 1), **read_first_dense_layers(values, 3)},
    write_extra=_write,
    find_unsupported=lambda values: (
        _unsupported_v3(values) or unsupported_layer_types(read_first_dense_layers(values, 3))
    ),
    layer_modules={**EXPERTS, **SHARED_EXPERTS},
    fused_kv_b=("transformers",),
    has_mtp_layers=True,
    mlx_lm_mismatch=_mismatch,
)


def _read_glm_layers(values: HFConfig) -> dict[str, Any]:
    types = values.get("mlp_layer_types")
    if not isinstance(types, list):
        return read_first_dense_layers(values, 1)
    return {"mlp_layer_types": tuple(map(str, types))} if DENSE in types else {}


def _write_glm(config: ModelConfig) -> dict[str, Any]:
    types = config.mlp_layer_types or (SPARSE,) * config.num_hidden_layers
    return {**_write(config), "mlp_layer_types": list(types)}


GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    _V3_FIELDS,
    defaults={
        **_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "max_position_embeddings": 202752,
        "num_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "routed_scaling_factor": 1.8,
    },
    fixed_values={"router": "sigmoid"},
    read_extra=lambda values: {**read_shared_experts(values, 1536, 1), **_read_glm_layers(values)},
    write_extra=_write_glm,
    find_unsupported=lambda values: _unsupported_v3(values) or unsupported_layer_types(_read_glm_layers(values)),
    layer_modules={**EXPERTS, **SHARED_EXPERTS},
    fused_kv_b=("transformers",),
    has_mtp_layers=True,
    mlx_lm_mismatch=_mismatch,
)
