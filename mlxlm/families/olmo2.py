"""OLMo 2: norms on the outputs of sublayers, and on the whole query and key projections."""

from mlxlm.families.family import LLAMA_FIELDS, Family, same_names

OLMO2 = Family(
    "olmo2",
    "Olmo2ForCausalLM",
    LLAMA_FIELDS | same_names("head_dim", "attention_bias"),
    fixed_values={"norm_placement": "output", "qk_norm": "projection"},
)
