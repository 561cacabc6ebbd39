"""MiniMax M2: norms of query and key projections, partial rotary positions, and experts with sigmoid scores."""

from __future__ import annotations

from typing import Any

from mlxlm.config.numbers import is_count
from mlxlm.families.family import LLAMA_FIELDS, NUM_EXPERTS, Family, HFConfig, same_names
from mlxlm.families.mixtral import EXPERT_MODULES


def _read(values: HFConfig) -> dict[str, Any]:
    """Files of the hub have `rotary_dim`."""
    rotary, head_dim = values.get("rotary_dim"), values.get("head_dim", 128)
    partial = {"partial_rotary_factor": rotary / head_dim} if is_count(rotary) and is_count(head_dim) else {}
    return {"moe_intermediate_size": values.get("intermediate_size"), **partial}


MINIMAX_M2 = Family(
    "minimax_m2",
    "MiniMaxM2ForCausalLM",
    {
        **LLAMA_FIELDS,
        **same_names("head_dim", "partial_rotary_factor", "num_experts_per_tok"),
        "num_experts": NUM_EXPERTS[::-1],
    },
    defaults={
        "rms_norm_eps": 1e-6,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196608,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    fixed_values={"router": "sigmoid", "qk_norm": "projection"},
    read_extra=_read,
    write_extra=lambda config: {"rotary_dim": config.rotary_dims(), "shared_intermediate_size": 0},  # for mlx_lm
    layer_modules={
        **EXPERT_MODULES,
        "block_sparse_moe.e_score_correction_bias": "mlp.gate.e_score_correction_bias",
    },
    has_mtp_layers=True,
    mlx_lm_mismatch=lambda config: "ignores RoPE scaling" if config.rope_scaling else None,
)
