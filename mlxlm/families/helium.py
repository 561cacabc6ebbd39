"""Helium: Llama with interleaved rotary positions."""

from mlxlm.families.family import LLAMA_FIELDS, Family, same_names

HELIUM = Family(
    "helium",
    "HeliumForCausalLM",
    LLAMA_FIELDS | same_names("head_dim", "attention_bias", "mlp_bias"),
    defaults={"rms_norm_eps": 1e-8, "num_key_value_heads": 20, "head_dim": 128, "max_position_embeddings": 4096},
    fixed_values={"attention_out_bias": False},
    rope_interleaved=True,
    mlx_lm_mismatch=lambda config: "ignores RoPE scaling" if config.rope_scaling else None,
)
