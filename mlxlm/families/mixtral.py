"""Mixtral: Mistral with experts in every layer."""

from mlxlm.families.family import NUM_EXPERTS, Family
from mlxlm.families.mistral import MISTRAL

_PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
EXPERT_MODULES = {
    "block_sparse_moe.gate": "mlp.gate",
    **{f"block_sparse_moe.experts.*.{name}": f"mlp.switch_mlp.{ours}" for name, ours in _PROJECTIONS.items()},
}

MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    {**MISTRAL.fields, "num_experts": NUM_EXPERTS[::-1], "num_experts_per_tok": "num_experts_per_tok"},
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    read_extra=lambda values: {"moe_intermediate_size": values.get("intermediate_size")},
    layer_modules=EXPERT_MODULES,
)
