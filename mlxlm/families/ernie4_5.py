"""ERNIE 4.5, dense: Llama with interleaved rotary positions."""

from __future__ import annotations

from mlxlm.families.family import LLAMA_FIELDS, Family, read_bool, same_names

ERNIE4_5 = Family(
    "ernie4_5",
    "Ernie4_5ForCausalLM",
    LLAMA_FIELDS | same_names("head_dim"),
    defaults={
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    read_extra=lambda values: dict.fromkeys(("attention_bias", "mlp_bias"), read_bool(values, "use_bias", False)),
    write_extra=lambda config: {"use_bias": config.mlp_bias},
    rope_interleaved=True,
    mlx_lm_mismatch=lambda config: "ignores RoPE scaling" if config.rope_scaling else None,
)
