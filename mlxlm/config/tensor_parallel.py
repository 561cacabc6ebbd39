"""Tensor parallelism: how several processes share a decoder (Shoeybi et al. 2019, "Megatron-LM").

Each process has some of the attention heads and of the columns of the feed-forwards: rows of the query, key, value,
gate and up projections, and the columns of the output and down projections that multiply their results. The outputs of
a sublayer are then summed over the processes. Embeddings, norms, routers and the head are whole everywhere. If there
are fewer key-value heads than processes, some have the same.
"""

from __future__ import annotations

from mlxlm.config.model_config import ModelConfig
from mlxlm.utils.errors import ConfigError

_SIZES = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def split_config(config: ModelConfig, size: int) -> ModelConfig:
    """The configuration of each of `size` equal parts of a model.

    Raises:
        ConfigError: It can't be divided.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    kinds = set(config.layer_sublayers)
    if not all(any(matrix.split for matrix in sublayer.matrices) for kind in kinds for sublayer in kind):
        raise ConfigError(f"layers of {config.model_type} can't be split over processes", "one machine")
    if config.qk_norm in ("projection", "layer_per_head"):
        problem = f"the norms of {config.model_type} with weights for all heads can't be split over processes"
        raise ConfigError(problem, "one machine")
    sizes = {name: value for name in _SIZES if (value := getattr(config, name)) is not None}
    divided = {"num_attention_heads": heads, **sizes}
    problems = [f"{name} {value}" for name, value in divided.items() if value % size]
    if kv_heads % size and size % kv_heads:
        problems.append(f"num_key_value_heads {kv_heads}")
    if problems:
        fitting = [n for n in range(2, size) if heads % n == 0 and not any(value % n for value in sizes.values())]
        hint = " or ".join(map(str, [n for n in fitting if not (kv_heads % n and n % kv_heads)])) or "one machine"
        raise ConfigError(f"{size} processes can't share {', '.join(problems)} equally", hint)
    changes = {name: value // size for name, value in divided.items()}
    return config.with_changes(**changes, num_key_value_heads=max(1, kv_heads // size), head_dim=config.head_dim)


def sent_values_per_token(config: ModelConfig, size: int) -> int:
    """How many values each process sends for a token: those of the sums of both sublayers, in a ring."""
    return 2 * config.num_hidden_layers * config.hidden_size * 2 * (size - 1) // size
