"""Llama and the families that keep its names: Mistral, Qwen, Gemma, Phi-3, OLMo 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.families.family import COMMON, QKV, Family, first_unsupported, flag, same_names
from mlxlm.families.sliding_window import read_sliding_window, write_sliding_window

_LLAMA = COMMON | same_names("num_key_value_heads", "rms_norm_eps", "hidden_act", "rope_theta")


def _read_qwen(values: Mapping[str, Any]) -> dict[str, Any]:
    window = values.get("sliding_window", 4096) if flag(values, "use_sliding_window", False) else None
    first = values.get("max_window_layers", 28)
    return read_sliding_window(values, window, lambda layer: isinstance(first, int) and layer >= first)


def _write_qwen(config: ModelConfig) -> dict[str, Any]:
    windows = write_sliding_window(config)
    full = [kind == "full_attention" for kind in windows["layer_types"]]
    first = full.index(False) if False in full else len(full)
    return {**windows, "use_sliding_window": config.sliding_window is not None, "max_window_layers": first}


def _read_gemma(values: Mapping[str, Any]) -> dict[str, Any]:
    """Embeddings times sqrt(hidden); "gelu" in the first files of Gemma meant the tanh form."""
    size = values.get("hidden_size")
    scaled = {"embedding_multiplier": size**0.5} if isinstance(size, int) and 0 < size < 2**31 else {}
    activation = values.get("hidden_activation") or values.get("hidden_act") or "gelu"
    return scaled | {"hidden_act": "gelu_pytorch_tanh" if activation == "gelu" else activation}


def _write_gemma(config: ModelConfig) -> dict[str, Any]:
    return {"hidden_act": config.hidden_act, "hidden_activation": config.hidden_act}


def _read_gemma2(values: Mapping[str, Any]) -> dict[str, Any]:
    window = values.get("sliding_window", 4096)
    return _read_gemma(values) | read_sliding_window(values, window, lambda layer: layer % 2 == 0)


def _write_gemma2(config: ModelConfig) -> dict[str, Any]:
    """transformers takes a whole number for the scalar, and no null."""
    scalar = config.query_pre_attn_scalar or config.head_dim
    whole = int(scalar) if float(scalar).is_integer() else scalar
    return {**_write_gemma(config), **write_sliding_window(config), "query_pre_attn_scalar": whole}


def _lacks_gemma(values: Mapping[str, Any]) -> str | None:
    return first_unsupported(values, use_bidirectional_attention=False)


def _write_phi3(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope_scaling or {}
    return {name: scaling[name] for name in ("original_max_position_embeddings",) if name in scaling}


LLAMAS = (
    Family(
        "llama",
        "LlamaForCausalLM",
        _LLAMA | same_names("head_dim", "attention_bias", "mlp_bias"),
        defaults={"rms_norm_eps": 1e-6},
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        _LLAMA | same_names("head_dim", "sliding_window"),
        defaults={
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 131072,
        },
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        _LLAMA | same_names("head_dim", "sliding_window"),
        defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "num_key_value_heads": 32},
        fixed_values={"attention_bias": True, "attention_out_bias": False},
        read=_read_qwen,
        write=_write_qwen,
        unsupported_reason=lambda values: first_unsupported(values, use_mrope=False),
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        _LLAMA | same_names("head_dim", "sliding_window", "attention_bias"),
        defaults={
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 32768,
            "num_key_value_heads": 32,
            "head_dim": 128,
        },
        fixed_values={"qk_norm": "head"},
        read=_read_qwen,
        write=_write_qwen,
    ),
    Family(
        "gemma",
        "GemmaForCausalLM",
        _LLAMA | same_names("head_dim", "attention_bias"),
        defaults={
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 8192,
            "num_key_value_heads": 16,
            "head_dim": 256,
            "tie_word_embeddings": True,
        },
        fixed_values={"norm_unit_offset": True},
        read=_read_gemma,
        write=_write_gemma,
        unsupported_reason=_lacks_gemma,
    ),
    Family(
        "gemma2",
        "Gemma2ForCausalLM",
        _LLAMA
        | same_names("head_dim", "sliding_window", "attention_bias")
        | same_names("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
        defaults={
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 8192,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "tie_word_embeddings": True,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        fixed_values={"norm_unit_offset": True, "norm_placement": "both"},
        read=_read_gemma2,
        write=_write_gemma2,
        unsupported_reason=_lacks_gemma,
    ),
    Family(
        "phi3",
        "Phi3ForCausalLM",
        _LLAMA | same_names("head_dim", "sliding_window", "partial_rotary_factor"),
        defaults={"max_position_embeddings": 4096},
        write=_write_phi3,
        layer={"self_attn.qkv_proj": QKV, "mlp.gate_up_proj": "mlp.gate_proj mlp.up_proj"},
    ),
    Family(
        "olmo2",
        "Olmo2ForCausalLM",
        _LLAMA | same_names("head_dim", "attention_bias"),
        fixed_values={"norm_placement": "output", "qk_norm": "projection"},
    ),
)
