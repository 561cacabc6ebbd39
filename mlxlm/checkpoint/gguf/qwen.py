"""llama.cpp's architectures of Qwen's mixtures and of its models with the gated delta rule.

Source: conversion/qwen.py, src/models/qwen2moe.cpp, qwen3next.cpp and qwen35.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.gguf.architecture import GATED_MLP, QK_NORMS, SEPARATE_QKV, Architecture, full_attention_problems
from mlxlm.checkpoint.gguf.header import MetadataReader
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from mlxlm.config import ModelConfig
from mlxlm.config.components import FULL
from mlxlm.families import FAMILIES

_HYBRID_LAYER = {
    "attn_norm": ("input_layernorm",),
    "post_attention_norm": ("post_attention_layernorm",),
    **SEPARATE_QKV,
    **QK_NORMS,
    "attn_q": ("self_attn.q_proj", "self_attn.gate_proj"),
    "attn_qkv": tuple(f"linear_attn.in_proj_{name}" for name in "qkv"),
    "attn_gate": ("linear_attn.in_proj_z",),
    "ssm_conv1d": ("linear_attn.conv1d",),
    "ssm_a": ("linear_attn.A_log",),
    "ssm_dt.bias": ("linear_attn.dt_bias",),
    "ssm_norm": ("linear_attn.norm",),
    "ssm_out": ("linear_attn.out_proj",),
}
_QWEN3_NEXT_LAYER = {
    "ssm_in": tuple(f"linear_attn.in_proj_{name}" for name in "qkvz"),  # of older files, instead of the next two
    **_HYBRID_LAYER,
    "ssm_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
}
_QWEN35_LAYER = {
    **_HYBRID_LAYER,
    "ssm_beta": ("linear_attn.in_proj_b",),
    "ssm_alpha": ("linear_attn.in_proj_a",),
    **GATED_MLP,
}
_GROUPS = {"attn_q": "num_attention_heads", "ssm_in": "linear_num_key_heads", "ssm_ba": "linear_num_key_heads"}
# Tensors with the heads of values, in another order in files of Qwen 3.5, and the axis of the heads.
_VALUE_HEADS = {
    **dict.fromkeys(("in_proj_v", "in_proj_z", "in_proj_b", "in_proj_a", "A_log", "dt_bias", "conv1d"), 0),
    "out_proj": -1,
}


def read_experts(keys: MetadataReader) -> dict[str, Any]:
    """The fields of a mixture."""
    used = keys.count("expert_used_count")
    width = keys.count("expert_feed_forward_length", keys.count("feed_forward_length", 0) // max(1, used))
    shared = keys.count("expert_shared_feed_forward_length", keys.count("feed_forward_length", width))
    return {
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": width,
        "shared_expert_intermediate_size": shared,
    }


def expert_metadata(config: ModelConfig) -> dict[str, Any]:
    """The metadata of a mixture."""
    shared = config.shared_expert_intermediate_size
    return {
        "expert_feed_forward_length": config.moe_intermediate_size,
        **({"expert_shared_feed_forward_length": shared} if shared else {}),
    }


def expert_problems(config: ModelConfig, norm_topk_prob: bool) -> Iterator[str]:
    """Reasons why llama.cpp can't run a mixture; `norm_topk_prob` is what it computes."""
    if config.norm_topk_prob != norm_topk_prob:
        yield f"norm_topk_prob is {config.norm_topk_prob}"
    if config.mlp_layer_types is not None:
        yield "some layers are dense"
    if config.shared_expert_gate and not config.shared_expert_intermediate_size:
        yield "it has no shared expert"


def _read_hybrid(keys: MetadataReader) -> dict[str, Any]:
    """The fields of the gated delta rule, and of experts if there are some."""
    heads, interval = keys.count("ssm.time_step_rank"), max(1, keys.count("full_attention_interval", 4))
    layers = keys.count("block_count") - keys.count("nextn_predict_layers", 0)
    return {
        "linear_num_value_heads": heads,
        "linear_num_key_heads": keys.count("ssm.group_count"),
        "linear_key_head_dim": keys.count("ssm.state_size"),
        "linear_value_head_dim": keys.count("ssm.inner_size") // max(1, heads),
        "linear_conv_kernel_dim": keys.count("ssm.conv_kernel"),
        "layer_types": ["linear_attention" if (layer + 1) % interval else FULL for layer in range(layers)],
        "attention_bias": False,
        **(read_experts(keys) if keys.count("expert_count", 0) else {}),
    }


def _hybrid_metadata(config: ModelConfig, has_sections: bool) -> dict[str, Any]:
    """The inverse of `_read_hybrid`; `has_sections`: with those of M-RoPE, which differ for images only."""
    heads, pairs = config.linear_num_value_heads or 0, config.rotary_dims() // 2
    return {
        "attention.head_count_kv": config.num_key_value_heads,  # one number for all layers
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * (config.linear_value_head_dim or 0),
        "full_attention_interval": _interval(config),
        **({"rope.dimension_sections": [(pairs + 2 - i) // 3 for i in range(3)] + [0]} if has_sections else {}),
        **(expert_metadata(config) if config.num_experts else {}),
    }


def _hybrid_problems(config: ModelConfig) -> Iterator[str]:
    """Reasons why llama.cpp can't run a model with the gated delta rule."""
    if config.linear_key_head_dim != config.linear_value_head_dim:
        yield f"linear_key_head_dim {config.linear_key_head_dim} isn't the linear_value_head_dim"
    yield from full_attention_problems([kind == FULL for kind in config.layer_types or ()], _interval(config))
    if config.num_experts:
        yield from expert_problems(config, norm_topk_prob=True)


def _interval(config: ModelConfig) -> int:
    return int(FAMILIES[config.model_type].write_extra(config)["full_attention_interval"])


def _reorder(config: ModelConfig, tensors: LazyTensors, to_file: bool) -> dict[str, LazyTensor]:
    """Reorder the heads of values. Of those that share a key, files have all first ones, then all second ones."""
    key_heads = config.linear_num_key_heads or 1
    counts = key_heads, (config.linear_num_value_heads or 1) // key_heads
    keys = 2 * key_heads * (config.linear_key_head_dim or 0)
    result = {}
    for name, tensor in tensors.items():
        part = name.partition(".linear_attn.")[2].partition(".")[0]
        if part in _VALUE_HEADS:
            start, order = keys if part == "conv1d" else 0, counts if to_file else counts[::-1]
            tensor = tensor.transform(partial(_swap_heads, start=start, axis=_VALUE_HEADS[part], counts=order))
        result[name] = tensor
    return result


def _swap_heads(value: mx.array, start: int, axis: int, counts: tuple[int, int]) -> mx.array:
    """Swap the two counts of heads along an axis, from `start` on."""
    before, heads = mx.split(value, [start], axis=axis)
    axis %= value.ndim
    shape = (*heads.shape[:axis], *counts, -1, *heads.shape[axis + 1 :])
    heads = heads.reshape(shape).swapaxes(axis, axis + 1).reshape(heads.shape)
    return mx.concatenate([before, heads], axis=axis)


_QWEN3_NEXT = Architecture(
    "qwen3next",
    ("qwen3_next",),
    _QWEN3_NEXT_LAYER,
    norm_offset=True,
    groups=_GROUPS,
    biases="none",
    experts=True,
    free_head_dim=True,
    recurrent="linear_attention",
    read_fields=lambda keys: {**_read_hybrid(keys), "norm_topk_prob": True},
    metadata=partial(_hybrid_metadata, has_sections=False),
    problems=_hybrid_problems,
)
_QWEN35 = replace(
    _QWEN3_NEXT,
    name="qwen35",
    families=("qwen3_5_text",),
    layer=_QWEN35_LAYER,
    experts=False,
    reorder=_reorder,
    read_fields=_read_hybrid,
    metadata=partial(_hybrid_metadata, has_sections=True),
)
HYBRIDS = _QWEN3_NEXT, _QWEN35, replace(_QWEN35, name="qwen35moe", families=("qwen3_5_moe_text",), experts=True)
