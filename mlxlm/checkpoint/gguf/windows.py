"""llama.cpp's models with sliding windows in some layers: Gemma, OLMo 2 and 3, and GPT-OSS.

Source: src/models/gemma2.cpp, gemma3.cpp, olmo2.cpp and openai-moe.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlxlm.checkpoint.gguf.architecture import (
    GATED_MLP,
    LLAMA_LAYER,
    QK_NORMS,
    SEPARATE_QKV,
    Architecture,
    read_biases,
    read_experts,
)
from mlxlm.checkpoint.gguf.header import MetadataReader
from mlxlm.checkpoint.gguf.rope_metadata import read_rope_parameters
from mlxlm.config import ModelConfig
from mlxlm.config.components import FULL, SLIDING

_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh")
_GEMMA2_LAYER = {
    **SEPARATE_QKV,
    **GATED_MLP,
    "attn_norm": ("input_layernorm",),
    "post_attention_norm": ("post_attention_layernorm",),
    "ffn_norm": ("pre_feedforward_layernorm",),
    "post_ffw_norm": ("post_feedforward_layernorm",),
}
_SOFT_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # of Gemma 2, with its defaults


def _read_gemma(keys: MetadataReader) -> dict[str, Any]:
    return {"hidden_activation": "gelu_pytorch_tanh", **read_biases(keys)}


def _gemma_problems(config: ModelConfig) -> Iterator[str]:
    if not config.tie_word_embeddings:
        yield "tie_word_embeddings is False"


def _gemma2_attention_scalar(layers: int, hidden: int, heads: int, head_dim: int) -> int:
    """llama.cpp recognizes the 27B model, which has another attention scale, by its number of layers."""
    return hidden // heads if layers == 46 else head_dim


def _read_gemma2(keys: MetadataReader) -> dict[str, Any]:
    sizes = ("block_count", "embedding_length", "attention.head_count", "attention.key_length")
    return {
        "query_pre_attn_scalar": _gemma2_attention_scalar(*map(keys.count, sizes)),
        "sliding_window": keys.count("attention.sliding_window", 4096),
        **{name: keys.number(name, default) for name, default in _SOFT_CAPS.items()},
        **_read_gemma(keys),
    }


def _gemma2_problems(config: ModelConfig) -> Iterator[str]:
    yield from _gemma_problems(config)
    layers = config.num_hidden_layers
    scalar = _gemma2_attention_scalar(layers, config.hidden_size, config.num_attention_heads, config.head_dim)
    if config.query_pre_attn_scalar != scalar:
        yield f"query_pre_attn_scalar is {config.query_pre_attn_scalar}, its gemma2 has {scalar}"
    if not all(getattr(config, name) for name in _SOFT_CAPS):
        yield "attn_logit_softcapping and final_logit_softcapping must be set"
    yield from _alternating_problems(config)


def _alternating_problems(config: ModelConfig) -> Iterator[str]:
    layers = range(config.num_hidden_layers)
    if [config.window(i) is not None for i in layers] != [i % 2 == 0 for i in layers]:
        yield "layer_types must alternate between sliding and full attention"


def _read_pattern(keys: MetadataReader, default: int) -> dict[str, Any]:
    """The layers with a window: all but each that is a multiple of the pattern."""
    window, layers = keys.count("attention.sliding_window", 0), keys.count("block_count")
    pattern = keys.count("attention.sliding_window_pattern", default) or default
    types = [SLIDING if window and (i + 1) % pattern else FULL for i in range(layers)]
    return {"sliding_window": window or None, "layer_types": types}


def _read_ropes(keys: MetadataReader, head_dim: int, local_base: float) -> dict[str, Any]:
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", local_base)}
    return {"rope_parameters": {FULL: read_rope_parameters(keys, head_dim), SLIDING: local}}


def _pattern_metadata(config: ModelConfig, pattern: int) -> dict[str, Any]:
    if config.sliding_window is None:
        return {}
    base = config.rope_local_base_freq or config.rope_theta
    return {"attention.sliding_window_pattern": pattern, "rope.freq_base_swa": float(base)}


def _pattern_problems(config: ModelConfig, pattern: int) -> Iterator[str]:
    windows = [config.window(i) is not None for i in range(config.num_hidden_layers)]
    if any(windows) and windows != [(i + 1) % pattern != 0 for i in range(len(windows))]:
        yield f"layer_types must have full attention in each layer that is a multiple of {pattern}, and in no other"


def _gemma3_attention_scalar(layers: int, hidden: int, heads: int, head_dim: int) -> int:
    """llama.cpp recognizes the 27B model, which has another attention scale, by its number of layers."""
    return hidden // heads if layers == 62 else head_dim


def _read_gemma3(keys: MetadataReader) -> dict[str, Any]:
    sizes = ("block_count", "embedding_length", "attention.head_count", "attention.key_length")
    layers, hidden, heads, head_dim = map(keys.count, sizes)
    return {
        **_read_pattern(keys, 6),
        **_read_ropes(keys, head_dim, 10_000.0),
        "query_pre_attn_scalar": _gemma3_attention_scalar(layers, hidden, heads, head_dim),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma3_problems(config: ModelConfig) -> Iterator[str]:
    yield from _gemma_problems(config)
    yield from _pattern_problems(config, 6)
    layers = config.num_hidden_layers
    scalar = _gemma3_attention_scalar(layers, config.hidden_size, config.num_attention_heads, config.head_dim)
    if config.query_pre_attn_scalar != scalar:
        yield f"query_pre_attn_scalar is {config.query_pre_attn_scalar}, its gemma3 has {scalar}"
    if config.attn_logit_softcapping or config.final_logit_softcapping:
        yield "attn_logit_softcapping and final_logit_softcapping must be null"
    if config.sliding_window and not config.rope_local_base_freq:
        yield "its layers with a window have a RoPE without scaling"


def _read_olmo2(keys: MetadataReader) -> dict[str, Any]:
    """With a sliding window, it is OLMo 3."""
    if not keys.count("attention.sliding_window", 0):
        return read_biases(keys)
    head_dim = keys.count("embedding_length") // keys.count("attention.head_count")
    ropes = _read_ropes(keys, head_dim, keys.number("rope.freq_base", 10_000.0))
    return {"model_type": "olmo3", **read_biases(keys), **_read_pattern(keys, 4), **ropes}


def _read_gpt_oss(keys: MetadataReader) -> dict[str, Any]:
    return {
        **read_experts(keys),
        "intermediate_size": keys.count("expert_feed_forward_length"),
        "sliding_window": keys.count("attention.sliding_window"),
        "attention_bias": True,
    }


def _gpt_oss_problems(config: ModelConfig) -> Iterator[str]:
    if (config.swiglu_limit, config.swiglu_alpha) != (7.0, 1.702):
        yield f"swiglu_limit is {config.swiglu_limit} and swiglu_alpha {config.swiglu_alpha}, it has 7 and 1.702"
    yield from _alternating_problems(config)


ARCHITECTURES = (
    Architecture(
        "gemma",
        ("gemma",),
        LLAMA_LAYER,
        norm_offset=True,
        free_head_dim=True,
        activations=_GELU_TANH,
        read_fields=_read_gemma,
        problems=_gemma_problems,
    ),
    Architecture(
        "gemma2",
        ("gemma2",),
        _GEMMA2_LAYER,
        norm_offset=True,
        free_head_dim=True,
        sliding_window=True,
        activations=_GELU_TANH,
        read_fields=_read_gemma2,
        metadata=lambda config: {name: float(getattr(config, name)) for name in _SOFT_CAPS},
        problems=_gemma2_problems,
    ),
    Architecture(
        "gemma3",
        ("gemma3_text",),
        {**_GEMMA2_LAYER, **QK_NORMS},
        norm_offset=True,
        free_head_dim=True,
        sliding_window=True,
        activations=_GELU_TANH,
        read_fields=_read_gemma3,
        metadata=lambda config: _pattern_metadata(config, 6),
        problems=_gemma3_problems,
    ),
    Architecture(
        "olmo2",
        ("olmo2", "olmo3"),
        {
            **SEPARATE_QKV,
            **QK_NORMS,
            **GATED_MLP,
            "post_attention_norm": ("post_attention_layernorm",),
            "post_ffw_norm": ("post_feedforward_layernorm",),
        },
        ties_head=False,
        sliding_window=True,
        read_fields=_read_olmo2,
        metadata=lambda config: _pattern_metadata(config, 4),
        problems=lambda config: _pattern_problems(config, 4),
    ),
    Architecture(
        "gpt-oss",
        ("gpt_oss",),
        {
            "attn_norm": ("input_layernorm",),
            "post_attention_norm": ("post_attention_layernorm",),
            **SEPARATE_QKV,
            "attn_sinks.weight": ("self_attn.sinks",),
        },
        experts=True,
        biases="all",
        free_head_dim=True,
        ties_head=False,
        sliding_window=True,
        yarn_truncate=False,
        read_fields=_read_gpt_oss,
        metadata=lambda config: {"expert_feed_forward_length": config.moe_intermediate_size},
        problems=_gpt_oss_problems,
    ),
)
