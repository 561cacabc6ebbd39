"""llama.cpp's models with windows in some layers: Gemma, OLMo 2 and 3, Cohere, EXAONE 4, Llama 4 and GPT-OSS.

Source: src/models/gemma2.cpp, gemma3.cpp, gemma4.cpp, olmo2.cpp, command-r.cpp, cohere2.cpp, exaone4.cpp, llama4.cpp
and openai-moe.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlxlm.checkpoint.gguf.architecture import (
    GATED_MLP,
    LLAMA_LAYER,
    NORMS_AROUND,
    QK_NORMS,
    ROPE_TYPES,
    SEPARATE_QKV,
    TOP_MODULES,
    Architecture,
    full_attention_problems,
    read_biases,
    read_experts,
)
from mlxlm.checkpoint.gguf.header import MetadataReader
from mlxlm.checkpoint.gguf.rope_metadata import read_rope_parameters
from mlxlm.config import ModelConfig
from mlxlm.config.components import CHUNKED, FULL, SLIDING
from mlxlm.families.family import inverse

_GELU_TANH = ("gelu_new", "gelu_pytorch_tanh")
_GEMMA2_LAYER = {**SEPARATE_QKV, **GATED_MLP, **NORMS_AROUND}
_OUTPUT_NORM_LAYER = {
    **SEPARATE_QKV,
    **QK_NORMS,
    **GATED_MLP,
    "post_attention_norm": ("post_attention_layernorm",),
    "post_ffw_norm": ("post_feedforward_layernorm",),
}
_COHERE_LAYER = {"attn_norm": ("input_layernorm",), **SEPARATE_QKV, **QK_NORMS, **GATED_MLP}
_LARGE = 64  # layers of Command R+ and EXAONE 4 32B, which differ from the smaller ones
_CHUNK = 8192  # of Llama 4's attention
_MAVERICK_EXPERTS = 128  # Llama 4 Maverick, which llama.cpp recognizes by them, has no norms of queries and keys
_SOFT_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}  # of Gemma 2, with its defaults


def _read_gemma(keys: MetadataReader) -> dict[str, Any]:
    return {"hidden_activation": "gelu_pytorch_tanh", **read_biases(keys)}


def _gemma_problems(config: ModelConfig) -> Iterator[str]:
    if not config.tie_word_embeddings:
        yield "tie_word_embeddings is False"


def _read_attention_scalar(keys: MetadataReader) -> dict[str, int]:
    sizes = ("block_count", "embedding_length", "attention.head_count", "attention.key_length")
    return {"query_pre_attn_scalar": _attention_scalar(*map(keys.count, sizes))}


def _attention_scalar(layers: int, hidden: int, heads: int, head_dim: int) -> int:
    """llama.cpp recognizes the 27B models, which have another attention scale, by their number of layers."""
    return hidden // heads if layers in (46, 62) else head_dim


def _attention_scalar_problems(config: ModelConfig, name: str) -> Iterator[str]:
    layers = config.num_hidden_layers
    scalar = _attention_scalar(layers, config.hidden_size, config.num_attention_heads, config.head_dim)
    if config.query_pre_attn_scalar != scalar:
        yield f"query_pre_attn_scalar is {config.query_pre_attn_scalar}, its {name} has {scalar}"


def _read_gemma2(keys: MetadataReader) -> dict[str, Any]:
    return {
        **_read_attention_scalar(keys),
        "sliding_window": keys.count("attention.sliding_window", 4096),
        **{name: keys.number(name, default) for name, default in _SOFT_CAPS.items()},
        **_read_gemma(keys),
    }


def _gemma2_problems(config: ModelConfig) -> Iterator[str]:
    yield from _gemma_problems(config)
    yield from _attention_scalar_problems(config, "gemma2")
    if not all(getattr(config, name) for name in _SOFT_CAPS):
        yield "attn_logit_softcapping and final_logit_softcapping must be set"
    yield from _alternating_problems(config)


def _alternating_problems(config: ModelConfig) -> Iterator[str]:
    layers = range(config.num_hidden_layers)
    if [config.window(i) is not None for i in layers] != [i % 2 == 0 for i in layers]:
        yield "layer_types must alternate between sliding and full attention"


def _read_pattern(keys: MetadataReader, default: int) -> dict[str, Any]:
    """The layers with a window: all but each that is a multiple of the pattern, which may be a list instead."""
    window, layers = keys.count("attention.sliding_window", 0), keys.count("block_count")
    windows = keys.flags("attention.sliding_window_pattern", layers)
    if windows is None:
        pattern = keys.count("attention.sliding_window_pattern", default) or default
        windows = [(i + 1) % pattern != 0 for i in range(layers)]
    types = [SLIDING if window and has_window else FULL for has_window in windows]
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
    is_full = [config.window(i) is None for i in range(config.num_hidden_layers)]
    if not all(is_full):
        yield from full_attention_problems(is_full, pattern)


def _read_gemma3(keys: MetadataReader) -> dict[str, Any]:
    return {
        **_read_pattern(keys, 6),
        **_read_ropes(keys, keys.count("attention.key_length"), 10_000.0),
        **_read_attention_scalar(keys),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma3_problems(config: ModelConfig) -> Iterator[str]:
    yield from _gemma_problems(config)
    yield from _pattern_problems(config, 6)
    yield from _attention_scalar_problems(config, "gemma3")
    if config.attn_logit_softcapping or config.final_logit_softcapping:
        yield "attn_logit_softcapping and final_logit_softcapping must be null"
    if config.sliding_window and not config.rope_local_base_freq:
        yield "its layers with a window have a RoPE without scaling"


def _read_gemma4(keys: MetadataReader) -> dict[str, Any]:
    layers, pattern = keys.count("block_count"), _read_pattern(keys, 6)
    types = pattern["layer_types"]
    keys.check(len(set(types)) == 2, "gemma4 needs layers with and without a window")
    full, head_dim = types.index(FULL), keys.count("attention.key_length")
    kv_heads, widths = (keys.counts(name, layers) for name in ("attention.head_count_kv", "feed_forward_length"))
    table = keys.header.tensors.get("per_layer_token_embd.weight")
    experts = keys.count("expert_count", 0)
    return {
        **pattern,
        **_read_ropes(keys, head_dim, 10_000.0),
        "head_dim": keys.count("attention.key_length_swa"),
        "global_head_dim": head_dim,
        "num_key_value_heads": kv_heads[types.index(SLIDING)],
        "num_global_key_value_heads": kv_heads[full],
        "attention_k_eq_v": not keys.has_tensor(f"blk.{full}.attn_v.weight"),
        "num_kv_shared_layers": keys.count("attention.shared_kv_layers", 0),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": widths[-1] == 2 * widths[0],
        "hidden_size_per_layer_input": keys.count("embedding_length_per_layer_input", 0),
        "vocab_size_per_layer_input": None if table is None else table.shape[0],
        "enable_moe_block": experts > 0,
        "num_experts": experts or None,
        "top_k_experts": keys.count("expert_used_count", 0) or None,
        "moe_intermediate_size": keys.count("expert_feed_forward_length", 0) or None,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma4_metadata(config: ModelConfig) -> dict[str, Any]:
    layers, width = range(config.num_hidden_layers), config.intermediate_size
    head_dim = config.global_head_dim or config.head_dim
    values: dict[str, Any] = {
        "attention.head_count_kv": [config.layer_kv_heads(layer) for layer in layers],
        "attention.sliding_window_pattern": [config.window(layer) is not None for layer in layers],
        "attention.shared_kv_layers": config.num_kv_shared_layers,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input or 0,
        "rope.dimension_count": head_dim,
        "rope.dimension_count_swa": config.head_dim,
        "rope.freq_base_swa": float(config.rope_local_base_freq or config.rope_theta),
    }
    for part in ("key", "value"):
        values |= {f"attention.{part}_length": head_dim, f"attention.{part}_length_swa": config.head_dim}
    if config.use_double_wide_mlp:
        values["feed_forward_length"] = [width * (1 + config.shares_kv(layer)) for layer in layers]
    if config.final_logit_softcapping:
        values["final_logit_softcapping"] = float(config.final_logit_softcapping)
    if config.num_experts:
        values["expert_feed_forward_length"] = config.moe_intermediate_size
    return values


def _gemma4_problems(config: ModelConfig) -> Iterator[str]:
    windows = [config.window(layer) is not None for layer in range(config.num_hidden_layers)]
    if len(set(windows)) == 1:
        yield "layer_types must have layers with and without a window"
    first = config.num_hidden_layers - config.num_kv_shared_layers
    if any(config.kv_layers[i] != first - 1 - windows[i] for i in range(first, config.num_hidden_layers)):
        yield "the two layers before those of num_kv_shared_layers must be sliding_attention and full_attention"
    if (kind := (config.rope_scaling or {}).get("rope_type")) != "proportional":
        yield f"rope_type is {kind!r}, that of its layers without a window is 'proportional'"


def _gemma4_layer(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    experts = {
        "ffn_gate_inp": ("experts.gate",),
        "ffn_gate_inp.scale": ("experts.router_scale",),
        "ffn_gate_up_exps": ("experts.switch_mlp.gate_proj", "experts.switch_mlp.up_proj"),
        "ffn_down_exps": ("experts.switch_mlp.down_proj",),
        "ffn_down_exps.scale": ("experts.per_expert_scale",),
        "post_ffw_norm_1": ("post_feedforward_layernorm_1",),
        "pre_ffw_norm_2": ("pre_feedforward_layernorm_2",),
        "post_ffw_norm_2": ("post_feedforward_layernorm_2",),
    }
    return experts if config.num_experts else {}


def _read_olmo2(keys: MetadataReader) -> dict[str, Any]:
    """With a sliding window, it is OLMo 3."""
    if not keys.count("attention.sliding_window", 0):
        return read_biases(keys)
    head_dim = keys.count("embedding_length") // keys.count("attention.head_count")
    ropes = _read_ropes(keys, head_dim, keys.number("rope.freq_base", 10_000.0))
    return {"model_type": "olmo3", **read_biases(keys), **_read_pattern(keys, 4), **ropes}


def _read_cohere(keys: MetadataReader) -> dict[str, Any]:
    return {
        "logit_scale": keys.number("logit_scale", 0.0) or 1.0,
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
        **read_biases(keys),
    }


def _cohere_metadata(config: ModelConfig) -> dict[str, Any]:
    return {"logit_scale": inverse(config.logits_scaling)}


def _cohere_problems(config: ModelConfig) -> Iterator[str]:
    if not config.tie_word_embeddings:
        yield "tie_word_embeddings is False"
    is_large = config.num_hidden_layers >= _LARGE
    if config.model_type == "cohere" and (config.qk_norm is not None) != is_large:
        yield f"use_qk_norm must be {is_large} with {config.num_hidden_layers} layers"


def _cohere2_problems(config: ModelConfig) -> Iterator[str]:
    yield from _cohere_problems(config)
    if config.sliding_window is None:
        yield "it has no sliding_window"
    yield from _pattern_problems(config, 4)


def _exaone4_problems(config: ModelConfig) -> Iterator[str]:
    """llama.cpp recognizes the 32B model, the one with windows, by its number of layers."""
    is_large = config.num_hidden_layers == _LARGE
    if (config.sliding_window is not None) != is_large:
        yield f"sliding_window must {'not ' if is_large else ''}be null with {config.num_hidden_layers} layers"
    yield from _pattern_problems(config, 4)


def _read_llama4(keys: MetadataReader) -> dict[str, Any]:
    keys.check(keys.count("attention.sliding_window", _CHUNK) > 0, "llama4 without chunked attention isn't supported")
    return {
        **read_experts(keys),
        "intermediate_size": keys.count("expert_feed_forward_length"),
        "interleave_moe_layer_step": keys.count("interleave_moe_layer_step"),
        "attention_chunk_size": _CHUNK,
        "use_qk_norm": keys.count("expert_count") != _MAVERICK_EXPERTS,
    }


def _llama4_step(config: ModelConfig) -> int:
    """The distance between layers with experts, of which the first is this far from the start, too."""
    return 1 + next(layer for layer in range(config.num_hidden_layers) if config.mlp(layer) == "experts")


def _llama4_problems(config: ModelConfig) -> Iterator[str]:
    if config.num_experts is None:
        yield "it has no experts"
        return
    layers, step = range(config.num_hidden_layers), _llama4_step(config)
    if any((config.mlp(layer) == "experts") != ((layer + 1) % step == 0) for layer in layers):
        yield f"the layers with experts must be the multiples of {step}"
    types, rope = config.layer_types or (FULL,) * len(layers), [config.has_rope(layer) for layer in layers]
    if [kind == CHUNKED for kind in types] != rope or rope != [(layer + 1) % 4 != 0 for layer in layers]:
        yield "it needs chunked attention and rotary positions, except in each layer that is a multiple of 4"
    if (config.attention_chunk_size, config.floor_scale, config.attn_scale) != (_CHUNK, _CHUNK, 0.1):
        yield f"attention_chunk_size and floor_scale must be {_CHUNK}, and attn_scale 0.1"
    if (config.qk_norm is None) != (config.num_experts == _MAVERICK_EXPERTS):
        yield f"use_qk_norm must be {config.qk_norm is None} with {config.num_experts} experts"


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
        "gemma4",
        ("gemma4_text",),
        {
            **_GEMMA2_LAYER,
            **QK_NORMS,
            "inp_gate": ("per_layer_input_gate",),
            "proj": ("per_layer_projection",),
            "post_norm": ("post_per_layer_input_norm",),
            "layer_output_scale.weight": ("layer_scalar",),
        },
        top_modules={
            **TOP_MODULES,
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        extra_layer=_gemma4_layer,
        biases="none",
        experts=True,
        free_head_dim=True,
        layer_sizes=True,
        sliding_window=True,
        activations=_GELU_TANH,
        rope_types=("proportional",),
        read_fields=_read_gemma4,
        metadata=_gemma4_metadata,
        problems=_gemma4_problems,
    ),
    Architecture(
        "olmo2",
        ("olmo2", "olmo3"),
        _OUTPUT_NORM_LAYER,
        ties_head=False,
        sliding_window=True,
        read_fields=_read_olmo2,
        metadata=lambda config: _pattern_metadata(config, 4),
        problems=lambda config: _pattern_problems(config, 4),
    ),
    Architecture(
        "command-r",
        ("cohere",),
        _COHERE_LAYER,
        interleaved=True,
        biases="none",
        read_fields=_read_cohere,
        metadata=_cohere_metadata,
        problems=_cohere_problems,
    ),
    Architecture(
        "cohere2",
        ("cohere2",),
        _COHERE_LAYER,
        interleaved=True,
        biases="none",
        sliding_window=True,
        read_fields=lambda keys: {**_read_cohere(keys), **_read_pattern(keys, 4)},
        metadata=lambda config: {**_cohere_metadata(config), **_pattern_metadata(config, 4)},
        problems=_cohere2_problems,
    ),
    Architecture(
        "exaone4",
        ("exaone4",),
        _OUTPUT_NORM_LAYER,
        biases="none",
        sliding_window=True,
        rope_types=(*ROPE_TYPES, "llama3"),
        read_fields=lambda keys: _read_pattern(keys, 4),
        metadata=lambda config: _pattern_metadata(config, 4),
        problems=_exaone4_problems,
    ),
    Architecture(
        "llama4",
        ("llama4_text",),
        LLAMA_LAYER,
        interleaved=True,
        biases="none",
        experts=True,
        free_head_dim=True,
        sliding_window=True,
        rope_types=(*ROPE_TYPES, "llama3"),
        read_fields=_read_llama4,
        metadata=lambda config: {
            "interleave_moe_layer_step": _llama4_step(config),
            "expert_feed_forward_length": config.moe_intermediate_size,
        },
        problems=_llama4_problems,
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
