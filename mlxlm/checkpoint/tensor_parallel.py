"""Tensor parallelism: the part of a checkpoint that one of several processes has.

Each process has some of the attention heads and of the columns of the feed-forwards (Shoeybi et al. 2019,
"Megatron-LM"): rows of the query, key, value, gate and up projections, and the columns of the output and down
projections that read them. The outputs of a sublayer are then summed over the processes (`Decoder.split`). Embeddings,
norms, routers and the head are whole everywhere. If there are fewer key-value heads than processes, some have the same.
"""

from __future__ import annotations

from dataclasses import replace

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.checkpoint import AnyCheckpoint, Checkpoint
from mlxlm.checkpoint.lazy_tensor import LazyTensor
from mlxlm.config import ModelConfig
from mlxlm.config.sublayers import Matrix
from mlxlm.utils.errors import CheckpointError, ConfigError

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
    if config.qk_norm == "projection":
        problem = f"the norms of {config.model_type} over the queries of all heads can't be split over processes"
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


def split_checkpoint(checkpoint: AnyCheckpoint, rank: int, size: int) -> Checkpoint:
    """Part `rank` of `size` equal parts of a checkpoint. Its tensors read no more of a safetensors file than they need.

    Raises:
        ConfigError, CheckpointError: It can't be divided.
    """
    if not isinstance(checkpoint, Checkpoint):
        reason = getattr(checkpoint, "unsupported_reason", "its architecture")
        problem = f"{checkpoint.path} is run by mlx_lm ({reason}), and can't be split over processes"
        raise CheckpointError(problem, "one machine")
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    part = split_config(config, size)
    for layer, kind in enumerate(config.layer_sublayers):
        for matrix in (matrix for sublayer in kind for matrix in sublayer.matrices if matrix.split):
            count = config.num_key_value_heads if matrix.group in ("key", "value") else size
            count = min(count, size)
            for parameter in ("weight", "scales", "biases", "bias"):
                name = f"model.layers.{layer}.{matrix.module}.{parameter}"
                if name in tensors:
                    tensors[name] = _part(tensors[name], matrix, name, rank * count // size, count, rank)
    packed = checkpoint.packed and split_checkpoint(checkpoint.packed, rank, size)
    return replace(checkpoint, config=part, tensors=tensors, packed=packed)


def _part(tensor: LazyTensor, matrix: Matrix, name: str, index: int, count: int, rank: int) -> LazyTensor:
    """Part `index` of `count` parts of one parameter of a matrix."""
    is_bias = name.endswith(".bias")
    if is_bias and matrix.split == "inputs":  # it is added once: to the sum
        return tensor if rank == 0 else tensor.transform(mx.zeros_like)
    axis = -1 if is_bias or matrix.split == "inputs" else -2
    if tensor.shape[axis] % count:
        groups = "groups of quantized inputs" if name.endswith((".scales", ".biases")) else "rows or columns"
        problem = f"{name} is {list(tensor.shape)}, whose {groups} {count} processes can't share equally"
        raise CheckpointError(problem, "fewer processes, a smaller group size, or an unquantized model")
    return tensor.part(axis, index, count)
