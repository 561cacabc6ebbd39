"""Tensor parallelism: how several processes share a decoder (Shoeybi et al. 2019, "Megatron-LM").

Each process has some of the attention heads, of the heads or channels of recurrent layers, and of the columns of the
feed-forwards: rows of the query, key, value, gate and up projections, and the columns of the output and down
projections that multiply their results. The outputs of a sublayer are then summed over the processes. Embeddings, norms
of the hidden size, routers, the latent vectors of latent attention, and the head are whole everywhere. If there are
fewer key-value heads than processes, some have the same.
"""

from __future__ import annotations

from mlxlm.config.model_config import ModelConfig
from mlxlm.utils.errors import ConfigError

_SIZES = (
    "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "linear_num_value_heads",
    "linear_num_key_heads", "mamba_n_heads",
)  # fmt: skip


def split_config(config: ModelConfig, size: int) -> ModelConfig:
    """The configuration of each of `size` equal parts of a model.

    Raises:
        ConfigError: It can't be divided.
    """
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    sizes = {name: value for name in _SIZES if (value := getattr(config, name)) is not None}
    if "conv" in (config.layer_types or ()):
        sizes["conv_dim"] = config.conv_dim or config.hidden_size
    divided = {"num_attention_heads": heads, **sizes}
    problems = [f"{name} {value}" for name, value in divided.items() if value % size]
    if kv_heads % size and size % kv_heads:
        problems.append(f"num_key_value_heads {kv_heads}")
    if (groups := config.mamba_n_groups) > 1 and groups % size:  # a single one is shared by all
        problems.append(f"mamba_n_groups {groups}")
    if problems:
        fitting = [n for n in range(2, size) if heads % n == 0 and not any(value % n for value in sizes.values())]
        fitting = [n for n in fitting if not (kv_heads % n and n % kv_heads or groups > 1 and groups % n)]
        hint = " or ".join(map(str, fitting)) or "one machine"
        raise ConfigError(f"{size} processes can't share {', '.join(problems)} equally", hint)
    changes = {name: value // size for name, value in divided.items()}
    changes |= {"num_key_value_heads": max(1, kv_heads // size), "mamba_n_groups": max(1, groups // size)}
    part = config.with_changes(**changes, head_dim=config.head_dim)
    for kinds in set(zip(config.layer_sublayers, part.layer_sublayers, strict=True)):
        if size > 1 and any(
            whole.matrices and whole.matrices == own.matrices for whole, own in zip(*kinds, strict=True)
        ):
            raise ConfigError(f"layers of {config.model_type} can't be split over processes", "one machine")
    return part


def sent_values_per_token(config: ModelConfig, size: int) -> int:
    """How many values each process sends for a token: those of the sums of both sublayers, in a ring."""
    return 2 * config.num_hidden_layers * config.hidden_size * 2 * (size - 1) // size
