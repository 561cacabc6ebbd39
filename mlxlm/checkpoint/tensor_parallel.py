"""The part of a checkpoint that one of several processes has: see `mlxlm.config.tensor_parallel`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mlxlm.backend.mlx import ON_CPU, mx, nn, tree_flatten
from mlxlm.backend.process_group import ProcessGroup
from mlxlm.checkpoint.checkpoint import Checkpoint
from mlxlm.checkpoint.dequantize import dequantize_tensors, dequantize_to_scales, unpacked_shapes
from mlxlm.config.tensor_parallel import split_config
from mlxlm.model import Decoder
from mlxlm.utils.errors import CheckpointError

_QUANTIZED = ("weight", "scales", "biases")


def split_checkpoint(checkpoint: Checkpoint, rank: int, size: int) -> Checkpoint:
    """Part `rank` of `size` equal parts of a checkpoint. Its tensors read no more of a safetensors file than they need.

    Where a part's configuration has a smaller parameter, it is divided along that axis. A quantized matrix whose groups
    can't be divided is dequantized.

    Raises:
        ConfigError: It can't be divided.
    """
    config, tensors = checkpoint.config, dict(checkpoint.tensors)
    part = split_config(config, size)
    whole_shapes = unpacked_shapes(tensors, config.quantization, str(checkpoint.path))
    blocks = {
        f"model.layers.{layer}.{matrix.module}": matrix.blocks
        for layer, kind in enumerate(config.layer_sublayers)
        for sublayer in kind
        for matrix in sublayer.matrices
    }
    for name, array in tree_flatten(Decoder(part).parameters()):
        whole = whole_shapes[name]
        axis = next((i - array.ndim for i, n in enumerate(array.shape) if n != whole[i]), None)
        if axis is None:
            continue
        module, _, parameter = name.rpartition(".")
        count = whole[axis] // array.shape[axis]  # less than `size` for key-value heads that several processes have
        names = [n for n in (f"{module}.{p}" for p in _QUANTIZED) if n in tensors] if parameter == "weight" else [name]
        if any(tensors[n].shape[axis] % count for n in names):
            dequantize = dequantize_tensors if ON_CPU else dequantize_to_scales
            matrix = dequantize({n: tensors.pop(n) for n in names}, config.quantization or {})
            tensors |= matrix
            names = list(matrix)
        for n in names:
            tensors[n] = tensors[n].part(axis, rank * count // size, count, blocks.get(module, ()))
        is_sum = parameter == "weight" and axis == -1 and array.ndim > 1
        if rank > 0 and is_sum and (bias := f"{module}.bias") in tensors:
            tensors[bias] = tensors[bias].transform(mx.zeros_like)  # it is added once
    packed = checkpoint.packed and split_checkpoint(checkpoint.packed, rank, size)
    return replace(checkpoint, config=part, tensors=tensors, packed=packed)


def shard_with_mlx_lm(model: nn.Module, process_group: ProcessGroup, path: Path) -> None:
    """Keep this process's part of a model of mlx_lm's classes, by mlx_lm's own code, and add up the parts' outputs.

    Raises:
        CheckpointError: mlx_lm can't divide it.
    """
    try:
        if not hasattr(model, "shard"):
            raise ValueError("mlx_lm has no tensor parallelism for this architecture")
        model.shard(process_group.mlx_group)
        model(mx.zeros((1, 1), mx.int32))  # without computing anything: sizes that can't be divided don't fit together
    except Exception as error:  # whatever its code raises
        problem = f"{path} can't be split over {process_group.size} processes: {error}"
        raise CheckpointError(problem, "fewer processes, or one machine") from None
    model.process_group = process_group
