"""Arcee (AFM): squared ReLU without a gate."""

from mlxlm.families.family import LLAMA_FIELDS, Family, same_names

ARCEE = Family(
    "arcee",
    "ArceeForCausalLM",
    LLAMA_FIELDS | same_names("head_dim", "attention_bias", "mlp_bias"),
    defaults={"hidden_act": "relu2", "max_position_embeddings": 4096},
    fixed_values={"mlp_gated": False},
)
