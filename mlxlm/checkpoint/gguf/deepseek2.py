"""llama.cpp's `deepseek2`: models with latent attention, from DeepSeek V2 and V3 to GLM-4.7-Flash.

Also `glm4moe` (GLM-4.5), which has the experts of DeepSeek V3, and grouped-query attention.

Files of `deepseek2` store `kv_b_proj` as it is, or since April 2025 its two parts, with a cache of one key-value head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlxlm.checkpoint.gguf.architecture import GATED_MLP, QK_NORMS, SEPARATE_QKV, read_biases
from mlxlm.checkpoint.gguf.header import MetadataReader
from mlxlm.checkpoint.gguf.rope_metadata import read_rope_parameters
from mlxlm.config import ModelConfig
from mlxlm.config.components import DENSE
from mlxlm.families.family import write_shared_experts

LAYER = {
    "attn_norm": ("input_layernorm",),
    "attn_q": ("self_attn.q_proj",),
    "attn_q_a": ("self_attn.q_a_proj",),
    "attn_q_a_norm": ("self_attn.q_a_layernorm",),
    "attn_q_b": ("self_attn.q_b_proj",),
    "attn_kv_a_mqa": ("self_attn.kv_a_proj_with_mqa",),
    "attn_kv_a_norm": ("self_attn.kv_a_layernorm",),
    "attn_k_b": ("self_attn.embed_q",),
    "attn_v_b": ("self_attn.unembed_out",),
    "attn_output": ("self_attn.o_proj",),
    "ffn_norm": ("post_attention_layernorm",),
    **GATED_MLP,
}
GLM4_MOE_LAYER = {
    "attn_norm": ("input_layernorm",),
    **SEPARATE_QKV,
    **QK_NORMS,
    "post_attention_norm": ("post_attention_layernorm",),
    **GATED_MLP,
}
GATING = {"softmax": 1, "sigmoid": 2}  # `expert_gating_func`; files of DeepSeek V2 may not have it
YARN_LOG = "rope.scaling.yarn_log_multiplier"  # here a tenth of mscale and mscale_all_dim


def read_fields(keys: MetadataReader) -> dict[str, Any]:
    """The fields of Hugging Face's configuration, from the metadata of a file."""
    heads, rotary = keys.count("attention.head_count"), keys.count("rope.dimension_count")
    dims = (keys.count(f"attention.{part}_length_mla", 0) or keys.count(f"attention.{part}_length")
            for part in ("key", "value"))  # fmt: skip
    key_dim, value_dim = dims
    keys.check(key_dim > rotary, f"attention.key_length is {key_dim}, it must be more than {rotary} rotary dimensions")
    is_v3 = keys.count("expert_gating_func", 0) == GATING["sigmoid"]
    groups = keys.count("expert_group_count", 1)
    rope = read_rope_parameters(keys, rotary)
    if rope["rope_type"] == "yarn" and (multiplier := keys.number(YARN_LOG, 0.0)):
        rope |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * multiplier, 6))
    return {
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "num_key_value_heads": heads,
        "q_lora_rank": keys.count("attention.q_lora_rank") if keys.has_tensor("blk.0.attn_q_a.weight") else None,
        "kv_lora_rank": keys.count("attention.kv_lora_rank"),
        "qk_nope_head_dim": key_dim - rotary,
        "qk_rope_head_dim": rotary,
        "v_head_dim": value_dim,
        "rope_parameters": rope,
        "n_group": groups,
        "topk_group": keys.count("expert_group_used_count", 1),
        "topk_method": "noaux_tc" if is_v3 else "group_limited_greedy" if groups > 1 else "greedy",
        **_read_router(keys),
    }


def _read_router(keys: MetadataReader) -> dict[str, Any]:
    return {
        "n_routed_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "n_shared_experts": keys.count("expert_shared_count", 0),
        "first_k_dense_replace": keys.count("leading_dense_block_count", 0),
        "norm_topk_prob": keys.flag(f"{keys.architecture}.expert_weights_norm", False),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
    }


def router_metadata(config: ModelConfig) -> dict[str, Any]:
    """The metadata of the experts; keys without the architecture's prefix."""
    return {
        "leading_dense_block_count": (config.mlp_layer_types or ()).count(DENSE),
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_shared_count": write_shared_experts(config)["n_shared_experts"],
        "expert_weights_scale": float(config.routed_scaling_factor),
        "expert_weights_norm": config.norm_topk_prob,
        "expert_gating_func": GATING[config.router],
    }


def metadata(config: ModelConfig) -> dict[str, Any]:
    """The metadata of a configuration; keys without the architecture's prefix."""
    rank = config.kv_lora_rank or 0
    log_multiplier = (config.rope_scaling or {}).get("mscale_all_dim")
    groups = {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config.q_lora_rank or 0,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + config.rotary_dims(),
        "attention.value_length": rank,
        "attention.key_length_mla": config.head_dim,
        "attention.value_length_mla": config.v_head_dim,
        **router_metadata(config),
        **(groups if config.n_group > 1 else {}),
        **({YARN_LOG: 0.1 * log_multiplier} if log_multiplier else {}),
    }


def problems(config: ModelConfig) -> Iterator[str]:
    """Reasons why llama.cpp can't run a configuration."""
    yield from _dense_layer_problems(config)
    if config.router == "softmax" and config.n_group > 1:
        yield f"n_group is {config.n_group}, llama.cpp chooses groups as DeepSeek V3 does"


def _dense_layer_problems(config: ModelConfig) -> Iterator[str]:
    types = config.mlp_layer_types or ()
    if DENSE in types[types.count(DENSE) :]:
        yield "a dense layer follows one with experts"


def read_glm4_moe(keys: MetadataReader) -> dict[str, Any]:
    """As `read_fields`, of GLM-4.5."""
    return {
        **_read_router(keys),
        "n_group": 1,
        "topk_group": 1,
        **read_biases(keys),
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
    }


def glm4_moe_problems(config: ModelConfig) -> Iterator[str]:
    """As `problems`, of GLM-4.5."""
    yield from _dense_layer_problems(config)
    if config.n_group != 1:
        yield f"n_group is {config.n_group}"
    if not config.shared_expert_intermediate_size:
        yield "it has no shared experts"
