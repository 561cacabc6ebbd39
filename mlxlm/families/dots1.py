"""dots.llm1: Qwen 3's attention, and DeepSeek V3's experts."""

from __future__ import annotations

from typing import Any

from mlxlm.families.family import (
    EXPERTS,
    LLAMA_FIELDS,
    SHARED_EXPERTS,
    Family,
    HFConfig,
    read_first_dense_layers,
    read_shared_experts,
    read_sliding_window,
    same_names,
    unsupported_layer_types,
    write_first_dense_layers,
    write_shared_experts,
    write_sliding_window,
)


def _read(values: HFConfig) -> dict[str, Any]:
    first = values.get("max_window_layers", 62)
    window = values.get("sliding_window", 4096)
    return {
        **read_sliding_window(values, window, lambda layer: isinstance(first, int) and layer >= first),
        **read_shared_experts(values, 1408, 0),
        **read_first_dense_layers(values, 0),
    }


DOTS1 = Family(
    "dots1",
    "Dots1ForCausalLM",
    LLAMA_FIELDS
    | same_names(
        "head_dim", "attention_bias", "sliding_window", "num_experts_per_tok", "moe_intermediate_size",
        "norm_topk_prob", "n_group", "topk_group", "routed_scaling_factor",
    )
    | {"num_experts": ("n_routed_experts", "num_local_experts")},
    defaults={
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 32,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
    },
    fixed_values={"router": "sigmoid", "qk_norm": "head"},
    read_extra=_read,
    write_extra=lambda c: {**write_sliding_window(c), **write_shared_experts(c), **write_first_dense_layers(c)},
    find_unsupported=lambda values: unsupported_layer_types(read_first_dense_layers(values, 0)),
    layer_modules={**EXPERTS, **SHARED_EXPERTS},
    mlx_lm_names={name: name.replace("*.", "") for name in EXPERTS},
)  # fmt: skip
