"""The part of a checkpoint that one of several processes has: see `mlxlm.config.tensor_parallel`."""

from __future__ import annotations

from dataclasses import replace

from mlxlm.backend.mlx import ON_CPU, mx, tree_flatten
from mlxlm.checkpoint.checkpoint import AnyCheckpoint, Checkpoint
from mlxlm.checkpoint.dequantize import dequantize_tensors, dequantize_to_scales, unpacked_shapes
from mlxlm.config.tensor_parallel import split_config
from mlxlm.model import Decoder
from mlxlm.utils.errors import CheckpointError

_QUANTIZED = ("weight", "scales", "biases")


def split_checkpoint(checkpoint: AnyCheckpoint, rank: int, size: int) -> Checkpoint:
    """Part `rank` of `size` equal parts of a checkpoint. Its tensors read no more of a safetensors file than they need.

    Where a part's configuration has a smaller parameter, it is divided along that axis. A quantized matrix whose groups
    can't be divided is dequantized.

    Raises:
        ConfigError, CheckpointError: It can't be divided.
    """
    if not isinstance(checkpoint, Checkpoint):
        reason = getattr(checkpoint, "unsupported_reason", "its architecture")
        problem = f"{checkpoint.path} is run by mlx_lm ({reason}), and can't be split over processes"
        raise CheckpointError(problem, "one machine")
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
