"""Llama: the layout that mlxlm itself writes."""

from mlxlm.families.family import LLAMA_FIELDS, Family, same_names

LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    LLAMA_FIELDS | same_names("head_dim", "attention_bias", "mlp_bias"),
    defaults={"rms_norm_eps": 1e-6},
)
