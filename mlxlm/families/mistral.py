"""Mistral (Llama with a sliding window in every layer) and Ministral (in some layers)."""

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
