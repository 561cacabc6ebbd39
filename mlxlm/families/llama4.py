"""Llama 4: chunked attention, layers without rotary positions, and experts of which most layers use one for a token.

MobileLLM-R1 is a Llama 4 without experts.
"""

from __future__ import annotations

from typing import Any

from mlxlm.config import ModelConfig
from mlxlm.config.components import CHUNKED, DENSE, FULL
from mlxlm.config.model_config import MAX_LAYERS
from mlxlm.families.family import (
    FUSED_EXPERTS,
    LLAMA_FIELDS,
    NUM_EXPERTS,
    Family,
    HFConfig,
    read_bool,
    read_mlp_layer_types,
    same_names,
)

_PROJECTIONS = "gate_proj", "up_proj", "down_proj"


def _read(values: HFConfig) -> dict[str, Any]:
    count = values.get("num_hidden_layers")
    layers = range(count) if isinstance(count, int) and count <= MAX_LAYERS else range(0)
    interval, rope = values.get("no_rope_layer_interval"), values.get("no_rope_layers")
    if not isinstance(rope, list) or not rope:
        interval = interval if isinstance(interval, int) and interval > 0 else 4
        rope = [(layer + 1) % interval != 0 for layer in layers]
    rope, chunk = [bool(has) for has in rope], values.get("attention_chunk_size", 8192)
    types = values.get("layer_types")
    if types is None:
        types = [CHUNKED if has and chunk is not None else FULL for has in rope]
    is_tuned = read_bool(values, "attn_temperature_tuning", True)
    return {
        "rope_layers": None if all(rope) else rope,
        **({} if types == [FULL] * len(rope) else {"layer_types": types, "attention_chunk_size": chunk}),
        "qk_norm": "l2" if read_bool(values, "use_qk_norm", True) else None,
        **({name: values.get(name, default) for name, default in _TUNING.items()} if is_tuned else {}),
        **_read_experts(values),
    }


_TUNING = {"attn_scale": 0.1, "floor_scale": 8192}


def _read_experts(values: HFConfig) -> dict[str, Any]:
    """Their layers and sizes; the shared expert is as wide as the others."""
    step, layers = values.get("interleave_moe_layer_step", 1), values.get("moe_layers")
    if not isinstance(layers, list):
        count, layers = values.get("num_hidden_layers"), []
        if isinstance(step, int) and step > 0 and isinstance(count, int):
            layers = list(range(step - 1, min(count, MAX_LAYERS), step))
    types = read_mlp_layer_types(values, lambda layer: layer not in layers)
    if set(types.get("mlp_layer_types", ())) == {DENSE}:
        return {"num_experts": None, "num_experts_per_tok": None}
    width = values.get("intermediate_size", 8192)
    shared = dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), width)
    return {**types, **shared, "router": "input_sigmoid", "norm_topk_prob": False}


def _write(config: ModelConfig) -> dict[str, Any]:
    layers = range(config.num_hidden_layers)
    floor = config.floor_scale or _TUNING["floor_scale"]
    return {
        "no_rope_layers": [int(config.has_rope(layer)) for layer in layers],
        "layer_types": list(config.layer_types or [FULL] * len(layers)),
        "use_qk_norm": config.qk_norm is not None,
        "attn_temperature_tuning": config.attn_scale is not None,
        "attn_scale": config.attn_scale or _TUNING["attn_scale"],
        "floor_scale": int(floor) if float(floor).is_integer() else floor,
        "moe_layers": [layer for layer in layers if config.mlp(layer) == "experts"],
        "intermediate_size": config.moe_intermediate_size or config.intermediate_size,
        "num_local_experts": config.num_experts or 1,
        "num_experts_per_tok": config.num_experts_per_tok or 1,
    }


def _mlx_lm_mismatch(config: ModelConfig) -> str | None:
    """mlx_lm has only the models without experts; its `llama4` is the language model of one with images."""
    lacks = {
        "experts": config.num_experts is not None,
        "chunked attention": config.layer_types is not None,
        "temperature tuning": config.attn_scale is not None,
        "an untied head": not config.tie_word_embeddings,
        "layers without QK-norm": config.qk_norm is not None and config.rope_layers is not None,
    }
    missing = [part for part, is_used in lacks.items() if is_used]
    return f"lacks {', '.join(missing)}" if missing else None


LLAMA4 = Family(
    "llama4_text",
    "Llama4ForCausalLM",
    {
        **LLAMA_FIELDS,
        **same_names("head_dim", "attention_bias", "attention_chunk_size", "num_experts_per_tok"),
        "intermediate_size": "intermediate_size_mlp",
        "num_experts": NUM_EXPERTS[::-1],
    },
    defaults={
        "intermediate_size": 16384,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "num_experts": 16,
        "num_experts_per_tok": 1,
    },
    read_extra=_read,
    write_extra=_write,
    layer_modules={
        **{f"feed_forward.{name}": f"mlp.{name}" for name in _PROJECTIONS},
        "feed_forward.router": "mlp.gate",
        **{f"feed_forward.shared_expert.{name}": f"mlp.shared_expert.{name}" for name in _PROJECTIONS},
        **{f"feed_forward.experts.{name}": f"mlp.switch_mlp.{name}" for name in _PROJECTIONS},  # mlx_lm
    },
    layer_tensors={f"feed_forward.experts.{name}": tensors for name, tensors in FUSED_EXPERTS.items()},
    transposed=frozenset(f"feed_forward.experts.{name}" for name in FUSED_EXPERTS),
    rope_interleaved=True,
    mlx_lm_mismatch=_mlx_lm_mismatch,
)
