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
        f"model.layers.{layer}.{matrix.module}": list(zip(matrix.blocks, own.blocks, strict=True))
        for layer, kinds in enumerate(zip(config.layer_sublayers, part.layer_sublayers, strict=True))
        for sublayers in zip(*kinds, strict=True)
        for matrix, own in zip(*(sublayer.matrices for sublayer in sublayers), strict=True)
    }
    for name, array in tree_flatten(Decoder(part).parameters()):
        whole = whole_shapes[name]
        axis = next((i - array.ndim for i, n in enumerate(array.shape) if n != whole[i]), None)
        if axis is None:
            continue
        module, _, parameter = name.rpartition(".")
        length = whole[axis]
        ranges = _ranges(blocks.get(module) or [(length, array.shape[axis])], rank, size)
        names = [n for n in (f"{module}.{p}" for p in _QUANTIZED) if n in tensors] if parameter == "weight" else [name]
        if any((end - first) * tensors[n].shape[axis] % length for n in names for first, end in ranges):
            dequantize = dequantize_tensors if ON_CPU else dequantize_to_scales
            tensors |= dequantize({n: tensors.pop(n) for n in names}, config.quantization or {})
            names = [name]
        for n in names:
            n_length = tensors[n].shape[axis]  # of a quantized matrix, packed values or groups
            tensors[n] = tensors[n].part(
                axis, [(first * n_length // length, end * n_length // length) for first, end in ranges]
            )
        is_sum = parameter == "weight" and axis == -1 and array.ndim > 1
        if rank > 0 and is_sum and (bias := f"{module}.bias") in tensors:
            tensors[bias] = tensors[bias].transform(mx.zeros_like)  # it is added once
    packed = checkpoint.packed and split_checkpoint(checkpoint.packed, rank, size)
    return replace(checkpoint, config=part, tensors=tensors, packed=packed)


def _ranges(blocks: list[tuple[int, int]], rank: int, size: int) -> list[tuple[int, int]]:
    """Where the parts of a rank are, from the sizes of whole blocks and of their parts.

    A block has fewer parts than there are ranks if several have the same key-value heads.
    """
    ranges, start = [], 0
    for whole, part in blocks:
        first = start + rank * (whole // part) // size * part
        ranges.append((first, first + part))
        start += whole
    return ranges


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
