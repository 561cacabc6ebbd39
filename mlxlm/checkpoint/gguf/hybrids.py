"""llama.cpp's models with recurrent layers: Granite 4, Nemotron-H and LFM2.

Source: src/models/granite-hybrid.cpp, nemotron-h.cpp, lfm2.cpp and lfm2moe.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from mlxlm.checkpoint.gguf.architecture import (
    LLAMA_LAYER,
    PLAIN_MLP,
    QK_NORMS,
    ROPE_TYPES,
    SEPARATE_QKV,
    Architecture,
    read_experts,
)
from mlxlm.checkpoint.gguf.deepseek2 import GATING
from mlxlm.checkpoint.gguf.header import MetadataReader
from mlxlm.config import ModelConfig
from mlxlm.config.components import FULL
from mlxlm.families.family import write_first_dense_layers
from mlxlm.families.nemotron_h import NEMOTRON_H

_SHORT_CONV = {f"shortconv.{name}": (f"conv.{name}",) for name in ("in_proj", "conv", "out_proj")}


def read_granite_multipliers(keys: MetadataReader) -> dict[str, Any]:
    """The multipliers of all Granite models."""
    return {
        "logits_scaling": keys.number("logit_scale", 1.0) or 1.0,
        "residual_multiplier": keys.number("residual_scale", 1.0) or 1.0,
        "embedding_multiplier": keys.number("embedding_scale", 1.0) or 1.0,
        "attention_multiplier": keys.number("attention.scale", 0.0)
        or (keys.count("embedding_length") // keys.count("attention.head_count")) ** -0.5,
    }


def granite_metadata(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `read_granite_multipliers`."""
    scalar = config.query_pre_attn_scalar
    return {
        **({} if scalar is None else {"attention.scale": float(scalar**-0.5)}),
        "logit_scale": float(config.logits_scaling),
        "residual_scale": float(config.residual_multiplier),
        "embedding_scale": float(config.embedding_multiplier),
    }


def _read_granite_hybrid(keys: MetadataReader) -> dict[str, Any]:
    layers, mamba = keys.count("block_count"), _read_mamba(keys)
    experts = read_experts(keys)
    attention = keys.counts("attention.head_count_kv", layers)
    first = next((i for i, kv_heads in enumerate(attention) if kv_heads), 0)
    return {
        **read_granite_multipliers(keys),
        **(experts or {"num_local_experts": 0}),
        "attention_bias": keys.has_tensor(f"blk.{first}.attn_q.bias"),
        "shared_intermediate_size": keys.count("expert_shared_feed_forward_length", 0)
        if experts
        else keys.count("feed_forward_length"),
        **mamba,
        "mamba_expand": mamba["mamba_n_heads"] * mamba["mamba_d_head"] // max(1, keys.count("embedding_length")),
        "position_embedding_type": "rope" if keys.flag("granitehybrid.rope.scaling.finetuned", True) else "nope",
    }


def _granite_hybrid_metadata(config: ModelConfig) -> dict[str, Any]:
    return {
        **granite_metadata(config),
        **({"expert_shared_feed_forward_length": config.shared_expert_intermediate_size} if config.num_experts else {}),
        **_mamba_metadata(config),
        "rope.scaling.finetuned": config.positions == "rope",
    }


def _granite_hybrid_problems(config: ModelConfig) -> Iterator[str]:
    if config.layer_types is None:
        yield "no layer has Mamba 2, but some have experts or no positions"
    elif (config.mamba_n_heads or 0) * (config.mamba_d_head or 0) != 2 * config.hidden_size:
        yield f"mamba_n_heads · mamba_d_head is not twice the hidden_size ({config.hidden_size})"
    yield from _mamba_problems(config)


def _read_mamba(keys: MetadataReader) -> dict[str, int]:
    inner, heads = keys.count("ssm.inner_size"), keys.count("ssm.time_step_rank")
    keys.check(heads > 0 and inner % heads == 0, f"ssm.time_step_rank {heads} doesn't divide ssm.inner_size {inner}")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_d_state": keys.count("ssm.state_size"),
        "mamba_d_conv": keys.count("ssm.conv_kernel"),
        "mamba_n_groups": keys.count("ssm.group_count"),
    }


def _mamba_metadata(config: ModelConfig) -> dict[str, Any]:
    heads = config.mamba_n_heads or 0
    return {
        "ssm.conv_kernel": config.mamba_d_conv,
        "ssm.inner_size": heads * (config.mamba_d_head or 0),
        "ssm.state_size": config.mamba_d_state,
        "ssm.time_step_rank": heads,
        "ssm.group_count": config.mamba_n_groups,
    }


def _mamba_problems(config: ModelConfig) -> Iterator[str]:
    if not config.mamba_conv_bias or config.mamba_proj_bias:
        yield "it needs mamba_conv_bias, and no mamba_proj_bias"
    if config.time_step_limit is not None:
        yield f"time_step_limit is {config.time_step_limit}"


def _read_nemotron_h(keys: MetadataReader) -> dict[str, Any]:
    layers, experts = keys.count("block_count"), keys.count("expert_count", 0)
    keys.check(not keys.count("nextn_predict_layers", 0), "layers that predict several tokens aren't supported")
    kv_heads, widths = (keys.counts(name, layers) for name in ("attention.head_count_kv", "feed_forward_length"))
    values: dict[str, Any] = {**_read_mamba(keys), "hidden_act": "relu2"}
    if experts:
        values |= {
            "num_experts": experts,
            "num_experts_per_tok": keys.count("expert_used_count"),
            "moe_intermediate_size": keys.count("expert_feed_forward_length"),
            "shared_expert_intermediate_size": keys.count("expert_shared_feed_forward_length"),
            "norm_topk_prob": keys.flag(f"{keys.architecture}.expert_weights_norm", False),
            "routed_scaling_factor": keys.number("expert_weights_scale", 0.0) or 1.0,
        }
    return {
        "layers_block_type": [
            FULL if heads else ("moe" if experts else "mlp") if width else "linear_attention"
            for heads, width in zip(kv_heads, widths, strict=True)
        ],
        **{NEMOTRON_H.hf_names(name)[0]: value for name, value in values.items()},
    }


def _nemotron_h_metadata(config: ModelConfig) -> dict[str, Any]:
    kv_heads, widths = [], []
    for layer, (mixer, *_) in enumerate(config.layer_sublayers):
        has_mlp, width = config.has_mlp(layer), config.moe_intermediate_size or config.intermediate_size
        kv_heads += [mixer.kv_heads, *[0] * has_mlp]
        widths += [0, *[width] * has_mlp]
    values: dict[str, Any] = {
        "block_count": len(widths),
        "attention.head_count_kv": kv_heads,
        "feed_forward_length": widths,
        "attention.layer_norm_epsilon": float(config.rms_norm_eps),  # which older versions of llama.cpp require, too
    }
    if config.num_experts:
        values |= {
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
            "expert_shared_count": 1,
            "expert_weights_norm": config.norm_topk_prob,
            "expert_weights_scale": float(config.routed_scaling_factor),
        }
    return {**values, **_mamba_metadata(config)}


def _nemotron_h_problems(config: ModelConfig, experts: bool) -> Iterator[str]:
    if config.layer_types is None:
        yield "no layer has Mamba 2"
    yield from _mamba_problems(config)
    if config.n_group > 1:
        yield f"n_group is {config.n_group}"
    if experts and any(config.mlp(layer) == "mlp" for layer in range(config.num_hidden_layers)):
        yield "some feed-forwards are dense"
    if experts != (config.num_experts is not None):
        yield "it has experts"


def _read_lfm2(keys: MetadataReader) -> dict[str, Any]:
    return {"conv_L_cache": keys.count("shortconv.l_cache"), "block_auto_adjust_ff_dim": False}


def _read_lfm2_moe(keys: MetadataReader) -> dict[str, Any]:
    return {
        **_read_lfm2(keys),
        "num_experts": keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "num_dense_layers": keys.count("leading_dense_block_count", 0),
    }


def _lfm2_metadata(config: ModelConfig) -> dict[str, Any]:
    values: dict[str, Any] = {"shortconv.l_cache": config.conv_L_cache}
    if config.num_experts:
        values |= {
            "expert_feed_forward_length": config.moe_intermediate_size,
            "leading_dense_block_count": write_first_dense_layers(config, "")[""],
            "expert_gating_func": GATING[config.router],
        }
    return values


def _lfm2_problems(config: ModelConfig) -> Iterator[str]:
    if config.conv_bias:
        yield "conv_bias is True"
    if config.num_experts and not (config.norm_topk_prob and config.routed_scaling_factor == 1):
        yield "it needs norm_topk_prob, and a routed_scaling_factor of 1"


ARCHITECTURES = (
    *(
        Architecture(
            name,
            ("nemotron_h",),
            {"attn_norm": ("input_layernorm",), **SEPARATE_QKV},
            mlp_layer={"attn_norm": ("post_attention_layernorm",), **PLAIN_MLP},
            interleaved=True,
            biases="none",
            activations=("relu2",),
            experts=experts,
            free_head_dim=True,
            recurrent="mamba",
            read_fields=_read_nemotron_h,
            metadata=_nemotron_h_metadata,
            problems=partial(_nemotron_h_problems, experts=experts),
        )
        for name, experts in (("nemotron_h_moe", True), ("nemotron_h", False))
    ),
    Architecture(
        "granitehybrid",
        ("granitemoehybrid",),
        LLAMA_LAYER,
        experts=True,
        interleaved=True,
        biases="qkv",
        recurrent="mamba",
        rope_types=(*ROPE_TYPES, "llama3"),
        read_fields=_read_granite_hybrid,
        metadata=_granite_hybrid_metadata,
        problems=_granite_hybrid_problems,
    ),
    *(
        Architecture(
            name,
            (family,),
            {**LLAMA_LAYER, **QK_NORMS, **_SHORT_CONV},
            {"token_embd": "model.embed_tokens", "token_embd_norm": "model.norm", "output": "lm_head"},
            biases="none",
            recurrent="conv",
            experts=name == "lfm2moe",
            read_fields=read_fields,
            metadata=_lfm2_metadata,
            problems=_lfm2_problems,
        )
        for name, family, read_fields in (
            ("lfm2", "lfm2", _read_lfm2),
            ("lfm2moe", "lfm2_moe", _read_lfm2_moe),
        )
    ),
)
