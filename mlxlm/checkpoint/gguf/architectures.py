"""The architectures of llama.cpp that can be read: tensor names, metadata, and what llama.cpp doesn't support.

Source: src/models/NAME.cpp and convert_hf_to_gguf.py of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlxlm.checkpoint.gguf import deepseek2, hybrids, qwen, windows
from mlxlm.checkpoint.gguf.architecture import (
    GATED_MLP,
    LLAMA_LAYER,
    NORMS,
    NORMS_AROUND,
    PLAIN_MLP,
    QK_NORMS,
    ROPE_TYPES,
    SEPARATE_QKV,
    TOP_MODULES,
    Architecture,
    read_biases,
    read_experts,
)
from mlxlm.checkpoint.gguf.header import MetadataReader
from mlxlm.checkpoint.gguf.rope_metadata import read_rope_parameters
from mlxlm.config import ModelConfig

_GELU = ("gelu", "gelu_new", "gelu_pytorch_tanh")  # llama.cpp has the tanh form for all of them
_FUSED_QKV = {
    "attn_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attn_output": ("self_attn.o_proj",),
}
_GPT_LAYER = {**NORMS, **_FUSED_QKV, **PLAIN_MLP}
_FUSED_GATED_MLP = {"ffn_up": ("mlp.gate_proj", "mlp.up_proj"), "ffn_down": ("mlp.down_proj",)}
_TEMPERATURE, _BETA = "attention.temperature_scale", "llama_4_scaling_beta"


def _read_all_biases(keys: MetadataReader) -> dict[str, Any]:
    return {**read_biases(keys), "mlp_bias": keys.has_tensor("blk.0.ffn_up.bias")}


def _olmoe_problems(config: ModelConfig) -> Iterator[str]:
    if config.clip_qkv is not None:
        yield f"clip_qkv is {config.clip_qkv:g}"
    if config.norm_topk_prob:
        yield "norm_topk_prob is True"
    yield from _grouped_query_problems(config)


def _grouped_query_problems(config: ModelConfig) -> Iterator[str]:
    if config.num_key_value_heads != config.num_attention_heads:
        yield "num_key_value_heads isn't num_attention_heads"


def _read_llama(keys: MetadataReader) -> dict[str, Any]:
    """A sliding window means Mistral; without one, Mistral and Llama are the same model. Experts mean Mixtral."""
    window = keys.count("attention.sliding_window", 0)
    if experts := read_experts(keys):
        return {"model_type": "mixtral", "sliding_window": window or None, **experts}
    if window:
        return {"model_type": "mistral", "sliding_window": window}
    return _read_all_biases(keys)


def _read_mistral3(keys: MetadataReader) -> dict[str, Any]:
    head_dim = keys.count("attention.key_length", keys.count("embedding_length") // keys.count("attention.head_count"))
    rope = {**read_rope_parameters(keys, head_dim), _BETA: keys.number(_TEMPERATURE, 0.0)}
    multiplier = keys.number(deepseek2.YARN_LOG, 0.0) or None
    return {"rope_parameters": {**rope, "mscale": multiplier, "mscale_all_dim": multiplier}}


def _mistral3_metadata(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling or {}
    return {deepseek2.YARN_LOG: float(scaling.get("mscale_all_dim", 0)), _TEMPERATURE: float(scaling.get(_BETA, 0))}


def _read_qwen2(keys: MetadataReader) -> dict[str, Any]:
    window = keys.count("attention.sliding_window", 0)
    return {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0} if window else {}


def _read_granite(keys: MetadataReader) -> dict[str, Any]:
    keys.check(keys.flag("granite.rope.scaling.finetuned", True), "granite without rotary positions isn't supported")
    return {**_read_all_biases(keys), **hybrids.read_granite_multipliers(keys)}


def _granite_problems(config: ModelConfig) -> Iterator[str]:
    """Of Granite 4 without Mamba and experts, which is Granite 3."""
    if config.num_experts is not None:
        yield "it has experts"
    if config.positions != "rope":
        yield "it has no rotary positions"


def _smollm3_problems(config: ModelConfig) -> Iterator[str]:
    if any(config.has_rope(i) == ((i + 1) % 4 == 0) for i in range(config.num_hidden_layers)):
        yield "every fourth layer, and no other, must have no rotary positions"
    if config.sliding_window:
        yield "sliding_window must be null"


def _falcon_norms(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    """Falcon 40B has a norm for each parallel sublayer; attn_norm_2 is the one of attention."""
    if config.shared_norm:
        return {}
    return {"attn_norm": ("post_attention_layernorm",), "attn_norm_2": ("input_layernorm",)}


def _read_falcon(keys: MetadataReader) -> dict[str, Any]:
    heads = keys.count("attention.head_count")
    kv_heads = keys.count("attention.head_count_kv", heads)
    two_norms = keys.has_tensor("blk.0.attn_norm_2.weight")
    grouped = two_norms or kv_heads not in (1, heads)
    return {
        "new_decoder_architecture": grouped,
        "num_ln_in_parallel_attn": 1 + two_norms if grouped else None,
        "multi_query": kv_heads == 1,
        "num_kv_heads": kv_heads,
        "parallel_attn": True,
        "alibi": False,
        "bias": False,
    }


def _falcon_problems(config: ModelConfig) -> Iterator[str]:
    if config.positions != "rope" or not config.parallel_residual:
        yield "its falcon needs rotary positions and parallel_attn"


def _read_stablelm(keys: MetadataReader) -> dict[str, Any]:
    """StableLM 2 12B has parallel sublayers with one norm, and norms of queries and keys."""
    return {
        "use_parallel_residual": not keys.has_tensor("blk.0.ffn_norm.weight"),
        "qk_layernorm": keys.has_tensor("blk.0.attn_q_norm.weight"),
        "use_qkv_bias": keys.has_tensor("blk.0.attn_q.bias"),
    }


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            "llama",
            ("llama", "mistral", "mixtral"),
            LLAMA_LAYER,
            experts=True,
            interleaved=True,
            biases="any",
            free_head_dim=True,
            rope_types=(*ROPE_TYPES, "llama3"),
            read_fields=_read_llama,
        ),
        Architecture(
            "mistral3",
            ("ministral3",),
            LLAMA_LAYER,
            interleaved=True,
            biases="none",
            free_head_dim=True,
            rope_types=("yarn",),
            yarn_multiplier=True,
            read_fields=_read_mistral3,
            metadata=_mistral3_metadata,
        ),
        Architecture("qwen2", ("qwen2",), LLAMA_LAYER, read_fields=_read_qwen2),
        Architecture(
            "qwen3",
            ("qwen3",),
            {**LLAMA_LAYER, **QK_NORMS},
            free_head_dim=True,
            read_fields=lambda keys: {**_read_qwen2(keys), **read_biases(keys)},
        ),
        Architecture(
            "qwen2moe",
            ("qwen2_moe",),
            LLAMA_LAYER,
            experts=True,
            ties_head=False,
            read_fields=lambda keys: {**qwen.read_experts(keys), "qkv_bias": keys.has_tensor("blk.0.attn_q.bias")},
            metadata=qwen.expert_metadata,
            problems=lambda config: qwen.expert_problems(config, norm_topk_prob=False),
        ),
        Architecture(
            "qwen3moe",
            ("qwen3_moe",),
            {**LLAMA_LAYER, **QK_NORMS},
            experts=True,
            biases="none",
            free_head_dim=True,
            read_fields=lambda keys: {**qwen.read_experts(keys), "norm_topk_prob": True},
            metadata=qwen.expert_metadata,
            problems=lambda config: qwen.expert_problems(config, norm_topk_prob=True),
        ),
        *qwen.HYBRIDS,
        Architecture(
            "glm4moe",
            ("glm4_moe",),
            deepseek2.GLM4_MOE_LAYER,
            experts=True,
            free_head_dim=True,
            read_fields=deepseek2.read_glm4_moe,
            metadata=deepseek2.router_metadata,
            problems=deepseek2.glm4_moe_problems,
        ),
        Architecture(
            "deepseek2",
            ("deepseek_v3", "deepseek_v2", "glm4_moe_lite"),
            deepseek2.LAYER,
            yarn_multiplier=True,
            experts=True,
            biases="none",
            ties_head=False,
            read_fields=deepseek2.read_fields,
            metadata=deepseek2.metadata,
            problems=deepseek2.problems,
        ),
        Architecture(
            "olmoe",
            ("olmoe",),
            {**LLAMA_LAYER, **QK_NORMS},
            experts=True,
            biases="none",
            ties_head=False,
            read_fields=lambda keys: {**read_experts(keys), "norm_topk_prob": False},
            problems=_olmoe_problems,
        ),
        Architecture(
            "minimax-m2",
            ("minimax_m2",),
            {**LLAMA_LAYER, **QK_NORMS},
            experts=True,
            biases="none",
            free_head_dim=True,
            ties_head=False,
            read_fields=read_experts,
            metadata=lambda config: {
                "expert_feed_forward_length": config.moe_intermediate_size,
                "expert_gating_func": deepseek2.GATING[config.router],
            },
        ),
        Architecture(
            "dots1",
            ("dots1",),
            {**LLAMA_LAYER, **QK_NORMS},
            experts=True,
            biases="none",
            free_head_dim=True,
            ties_head=False,
            read_fields=lambda keys: {**deepseek2.read_glm4_moe(keys), "sliding_window": None},
            metadata=deepseek2.router_metadata,
            problems=lambda config: (*deepseek2.glm4_moe_problems(config), *_grouped_query_problems(config)),
        ),
        Architecture(
            "smollm3",
            ("smollm3",),
            LLAMA_LAYER,
            interleaved=True,
            biases="any",
            read_fields=_read_all_biases,
            problems=_smollm3_problems,
        ),
        Architecture(
            "granite",
            ("granite", "granitemoehybrid"),
            LLAMA_LAYER,
            interleaved=True,
            biases="any",
            rope_types=(*ROPE_TYPES, "llama3"),
            read_fields=_read_granite,
            metadata=hybrids.granite_metadata,
            problems=_granite_problems,
        ),
        *hybrids.ARCHITECTURES,
        *windows.ARCHITECTURES,
        Architecture(
            "glm4",
            ("glm4",),
            {
                **SEPARATE_QKV,
                **_FUSED_GATED_MLP,
                **NORMS_AROUND,
            },
            interleaved=True,
            free_head_dim=True,
            read_fields=read_biases,
        ),
        Architecture(
            "chatglm",
            ("glm",),
            {**NORMS, **SEPARATE_QKV, **_FUSED_GATED_MLP},
            interleaved=True,
            read_fields=lambda keys: {
                **read_biases(keys),
                "head_dim": keys.count("embedding_length") // keys.count("attention.head_count"),
            },
        ),
        Architecture(
            "stablelm",
            ("stablelm",),
            {**LLAMA_LAYER, **QK_NORMS},
            ties_head=False,
            read_fields=_read_stablelm,
        ),
        Architecture(
            "ernie4_5",
            ("ernie4_5",),
            LLAMA_LAYER,
            interleaved=True,
            biases="none",
            free_head_dim=True,
        ),
        Architecture(
            "seed_oss",
            ("seed_oss",),
            {**LLAMA_LAYER, "post_attention_norm": LLAMA_LAYER["ffn_norm"]},
            free_head_dim=True,
            read_fields=read_biases,
        ),
        Architecture(
            "exaone",
            ("exaone",),
            LLAMA_LAYER,
            biases="none",
            rope_types=(*ROPE_TYPES, "llama3"),
        ),
        Architecture(
            "olmo",
            ("olmo",),
            {**SEPARATE_QKV, **GATED_MLP},
            {"token_embd": "model.embed_tokens", "output": "lm_head"},
            interleaved=True,
            biases="none",
            read_fields=lambda keys: {"clip_qkv": keys.number("attention.clamp_kqv", 0.0) or None},
            metadata=lambda config: {} if config.clip_qkv is None else {"attention.clamp_kqv": float(config.clip_qkv)},
        ),
        Architecture(
            "arcee",
            ("arcee",),
            {**NORMS, **SEPARATE_QKV, **PLAIN_MLP},
            interleaved=True,
            biases="none",
            activations=("relu2",),
            free_head_dim=True,
        ),
        Architecture(
            "starcoder2",
            ("starcoder2",),
            {**NORMS, **SEPARATE_QKV, **PLAIN_MLP},
            biases="all",
            activations=_GELU,
        ),
        Architecture(
            "phi2",
            ("phi",),
            # files from before 2024 have fused projections
            {"attn_norm": ("input_layernorm",), **_FUSED_QKV, **SEPARATE_QKV, **PLAIN_MLP},
            biases="all",
            ties_head=False,
            activations=_GELU,
        ),
        Architecture(
            "phi3",
            ("phi3",),
            {**NORMS, **_FUSED_QKV, **_FUSED_GATED_MLP},
            biases="none",
            rope_types=(*ROPE_TYPES, "longrope"),
            read_fields=lambda keys: {"sliding_window": keys.count("attention.sliding_window", 0) or None},
            # llama.cpp recognizes Phi-4 by a window of 0
            metadata=lambda config: {"attention.sliding_window": config.sliding_window or 0},
        ),
        Architecture(
            "gpt2",
            ("gpt2",),
            _GPT_LAYER,
            {**TOP_MODULES, "position_embd": "model.embed_positions"},
            biases="all",
            activations=_GELU,
        ),
        Architecture(
            "bloom",
            ("bloom",),
            _GPT_LAYER,
            {**TOP_MODULES, "token_embd_norm": "model.embed_layernorm"},
            biases="all",
            activations=_GELU,
        ),
        Architecture(
            "gptneox",
            ("gpt_neox",),
            _GPT_LAYER,
            biases="all",
            ties_head=False,
            read_fields=lambda keys: {"use_parallel_residual": keys.flag("gptneox.use_parallel_residual", True)},
            metadata=lambda config: {"use_parallel_residual": config.parallel_residual},
            activations=_GELU,
        ),
        Architecture(
            "falcon",
            ("falcon",),
            {"attn_norm": ("input_layernorm",), **_FUSED_QKV, **PLAIN_MLP},
            extra_layer=_falcon_norms,
            biases="none",
            read_fields=_read_falcon,
            metadata=lambda config: {"tensor_data_layout": "jploski"},  # queries, keys and values one after another
            problems=_falcon_problems,
            activations=_GELU,
        ),
    )
}
