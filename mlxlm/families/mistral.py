"""Mistral (Llama with a sliding window in every layer), Ministral (in some layers) and Ministral 3.

Ministral 3 has YaRN and Llama 4's scale of queries, which grows with their position.
"""

from __future__ import annotations

from mlxlm.families.family import LLAMA_FIELDS, Family, read_sliding_window, same_names, write_sliding_window

MISTRAL = Family(
    "mistral",
    "MistralForCausalLM",
    LLAMA_FIELDS | same_names("head_dim", "sliding_window"),
    defaults={
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
    },
)

MINISTRAL = Family(
    "ministral",
    "MinistralForCausalLM",
    MISTRAL.fields,
    defaults={**MISTRAL.defaults, "sliding_window": None},
    read_extra=lambda values: read_sliding_window(values, values.get("sliding_window", 4096)),
    write_extra=write_sliding_window,
)

MINISTRAL3 = Family(
    "ministral3",
    "Ministral3ForCausalLM",
    MISTRAL.fields,
    defaults={"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262144},
    mlx_lm_mismatch=lambda config: "ignores sliding_window" if config.sliding_window else None,
)
