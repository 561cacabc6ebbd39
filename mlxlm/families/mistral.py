"""Mistral: Llama with a sliding window in every layer."""

from mlxlm.families.family import LLAMA_FIELDS, Family, same_names

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
