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
_KV_HEADS = ("num_key_value_heads", "num_global_key_value_heads")


def split_config(config: ModelConfig, size: int) -> ModelConfig:
    """The configuration of each of `size` equal parts of a model.

    Raises:
        ConfigError: It can't be divided.
    """
    heads = config.num_attention_heads
    kv_heads = {name: value for name in _KV_HEADS if (value := getattr(config, name)) is not None}
    sizes = {name: value for name in _SIZES if (value := getattr(config, name)) is not None}
    if "conv" in (config.layer_types or ()):
        sizes["conv_dim"] = config.conv_dim or config.hidden_size
    divided = {"num_attention_heads": heads, **sizes}
    problems = [f"{name} {value}" for name, value in divided.items() if value % size]
    problems += [f"{name} {value}" for name, value in kv_heads.items() if value % size and size % value]
    if (groups := config.mamba_n_groups) > 1 and groups % size:  # a single one is shared by all
        problems.append(f"mamba_n_groups {groups}")
    if problems:
        fitting = [n for n in range(2, size) if heads % n == 0 and not any(value % n for value in sizes.values())]
        fitting = [n for n in fitting if not any(value % n and n % value for value in kv_heads.values())]
        fitting = [n for n in fitting if groups == 1 or groups % n == 0]
        hint = " or ".join(map(str, fitting)) or "one machine"
        raise ConfigError(f"{size} processes can't share {', '.join(problems)} equally", hint)
    changes = {name: value // size for name, value in divided.items()}
    changes |= {name: max(1, value // size) for name, value in {**kv_heads, "mamba_n_groups": groups}.items()}
    part = config.with_changes(**changes, head_dim=config.head_dim)
    for kinds in set(zip(config.layer_sublayers, part.layer_sublayers, strict=True)):
        whole, own = (sublayers[:2] for sublayers in kinds)  # all processes have the others whole, or they have experts
        if size > 1 and any(a.matrices and a.matrices == b.matrices for a, b in zip(whole, own, strict=True)):
            raise ConfigError(f"layers of {config.model_type} can't be split over processes", "one machine")
    return part


def sent_values_per_token(config: ModelConfig, size: int) -> int:
    """How many values each process sends for a token: those of the sums of the sublayers, in a ring."""
    sums = 2 + config.enable_moe_block
    return sums * config.num_hidden_layers * config.hidden_size * 2 * (size - 1) // size
