"""The fields of `ModelConfig` for mixtures of experts, and what is wrong with their values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mlxlm.config.components import DENSE, NO_MLP, SPARSE
from mlxlm.config.numbers import is_count
from mlxlm.utils.errors import short_repr

Config = Any  # a ModelConfig, whose module imports this one

EXPERT_FIELDS = (
    "num_experts_per_tok", "moe_intermediate_size", "router", "router_bias", "norm_topk_prob", "n_group", "topk_group",
    "routed_scaling_factor", "shared_expert_intermediate_size", "shared_expert_gate", "enable_moe_block",
)  # fmt: skip
MAX_EXPERTS = 10_000


def validate_experts(c: Config) -> Iterator[str]:
    """Yield a message for each problem of the fields of a mixture of experts, whose `num_experts` is set."""
    for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size"):
        value = getattr(c, name)
        if not is_count(value) and (value is not None or name != "shared_expert_intermediate_size"):
            yield f"{name} is {short_repr(value)}, it must be a positive whole number"
            return
    if c.num_experts_per_tok > c.num_experts:
        yield f"num_experts_per_tok is {c.num_experts_per_tok}, there are only {c.num_experts} experts"
    if c.num_experts > MAX_EXPERTS:
        yield f"num_experts is {c.num_experts}, at most {MAX_EXPERTS} are possible"
    if c.num_experts % c.n_group or c.topk_group > c.n_group:
        yield f"{c.num_experts} experts can't be in {c.n_group} groups of which {c.topk_group} are considered (1 and 1)"
    elif c.num_experts_per_tok > c.topk_group * (c.num_experts // c.n_group):
        yield f"num_experts_per_tok is {c.num_experts_per_tok}, more than the experts of {c.topk_group} groups"
    if c.shared_expert_gate and c.shared_expert_intermediate_size is None:
        yield "shared_expert_gate is true, but shared_expert_intermediate_size is null"
    if c.enable_moe_block and c.mlp_layer_types is not None:
        yield "enable_moe_block is true, so that all layers have experts and mlp_layer_types must be null"


def validate_mlp_layer_types(c: Config) -> Iterator[str]:
    """Yield a message for each problem of `mlp_layer_types`, which is set."""
    types = c.mlp_layer_types
    if not isinstance(types, tuple) or any(kind not in (DENSE, SPARSE, NO_MLP) for kind in types):
        yield f"mlp_layer_types must be a list of {DENSE}, {SPARSE} and {NO_MLP}"
    elif len(types) != c.num_hidden_layers:
        yield f"mlp_layer_types has {len(types)} entries, one for each of {c.num_hidden_layers} layers is needed"
    elif c.num_experts is not None and SPARSE not in types:
        yield "no layer has experts (num_experts=null)"
    elif c.num_experts is None and (SPARSE in types or NO_MLP not in types):
        yield "mlp_layer_types needs a number of experts, but num_experts is null (8)"
    elif NO_MLP in types and c.parallel_residual:
        yield "mlp_layer_types has none, but parallel_residual needs a feed-forward in each layer"
