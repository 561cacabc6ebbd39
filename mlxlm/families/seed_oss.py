"""Seed-OSS: biased query, key and value projections."""

from mlxlm.families.family import LLAMA_FIELDS, Family, same_names

SEED_OSS = Family(
    "seed_oss",
    "SeedOssForCausalLM",
    LLAMA_FIELDS | same_names("head_dim", "attention_bias", "attention_out_bias", "mlp_bias"),
    defaults={
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 524288,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
        "attention_out_bias": False,
    },
)
