"""OLMo, OLMo 2, OLMo 3 and OLMoE.

OLMo has LayerNorm without parameters. OLMo 2 has norms on the outputs of sublayers and on whole query and key
projections; OLMo 3 also sliding windows.
OLMoE has norms on the inputs of sublayers, on query and key projections, and experts.
"""

from __future__ import annotations

from typing import Any

from mlxlm.families.family import (
    COMMON_FIELDS,
    EXPERTS,
    LLAMA_FIELDS,
    NUM_EXPERTS,
    Family,
    HFConfig,
    read_sliding_window_pattern,
    same_names,
    write_sliding_window,
)

OLMO = Family(
    "olmo",
    "OlmoForCausalLM",
    COMMON_FIELDS | same_names("num_key_value_heads", "hidden_act", "rope_theta", "attention_bias", "clip_qkv"),
    fixed_values={"norm": "layer_no_weight"},
)

OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    LLAMA_FIELDS | same_names("head_dim", "attention_bias"),
    fixed_values={"norm_placement": "output", "qk_norm": "projection"},
)


def _read_olmo3(values: HFConfig) -> dict[str, Any]:
    return read_sliding_window_pattern(values, default_window=4096, default_pattern=4)


OLMO3 = Family(
    "olmo3",
    "Olmo3ForCausalLM",
    LLAMA_FIELDS | same_names("head_dim", "attention_bias", "sliding_window"),
    fixed_values=OLMO2.fixed_values,
    has_local_rope=True,
    read_extra=_read_olmo3,
    write_extra=write_sliding_window,
)

OLMOE = Family(
    "olmoe",
    "OlmoeForCausalLM",
    {
        **LLAMA_FIELDS,
        "num_experts": NUM_EXPERTS,
        **same_names("attention_bias", "clip_qkv", "num_experts_per_tok", "norm_topk_prob"),
    },
    defaults={"max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
    fixed_values={"qk_norm": "projection"},
    read_extra=lambda values: {"moe_intermediate_size": values.get("intermediate_size")},
    layer_modules=EXPERTS,
)
