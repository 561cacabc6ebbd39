"""The part of a checkpoint that one of several processes has: see `mlxlm.config.tensor_parallel`."""

from __future__ import annotations

from dataclasses import replace

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.checkpoint import AnyCheckpoint, Checkpoint
from mlxlm.checkpoint.lazy_tensor import LazyTensor
from mlxlm.config.sublayers import Matrix
from mlxlm.config.tensor_parallel import split_config
from mlxlm.utils.errors import CheckpointError


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
        if (name := f"model.layers.{layer}.self_attn.sinks") in tensors:  # one for each head
            tensors[name] = tensors[name].part(0, rank, size)
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
