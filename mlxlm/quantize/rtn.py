"""Rounding to nearest (RTN): tensors are quantized when they are read, from disk to disk in constant memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from mlxlm.backend.mlx import eval_in_parallel, mx
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from mlxlm.config.quantization import Format
from mlxlm.quantize.packed_matrix import PackedMatrix, row_pieces
from mlxlm.quantize.quantization_plan import QuantizationPlan

OnMatrix = Callable[[str, mx.array, PackedMatrix, Format], None]


def quantize_rtn(weight: mx.array, chosen: Format) -> PackedMatrix:
    """Round `weight` `[rows, width]` to nearest as mlx_lm.convert does; scales and biases have its dtype."""
    pieces = eval_in_parallel(partial(mx.quantize, weight[rows], **chosen.to_dict()) for rows in row_pieces(weight))
    return PackedMatrix.concatenate_rows([PackedMatrix(*piece) for piece in pieces])


def lazy_quantize(
    tensors: LazyTensors, plan: QuantizationPlan, on_matrix: OnMatrix | None = None
) -> dict[str, LazyTensor]:
    """Round the matrices of `plan` to nearest when they are read.

    The parts of a matrix (weight, scales, biases) are computed together and kept until each was read once, as writers
    read them one after the other.

    Args:
        tensors: The decoder's tensors in 16 bits.
        plan: The format of each matrix.
        on_matrix: Called as `on_matrix(module, weight, packed, format)` when a matrix was quantized.
    """
    pending: dict[str, dict[str, mx.array]] = {}  # module -> parts that weren't read yet

    def read_part(module: str, name: str, tensor: LazyTensor, fmt: Format) -> mx.array:
        if name not in pending.get(module, {}):
            weight = tensor.read()
            packed = quantize_rtn(weight, fmt)
            if on_matrix is not None:
                on_matrix(module, weight, packed, fmt)
            pending[module] = packed.parts(module)
        value = pending[module].pop(name)
        if not pending[module]:
            del pending[module]
        return value

    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        module, _, parameter = name.rpartition(".")
        fmt = plan.formats.get(module) if parameter == "weight" else None
        if fmt is None:
            result[name] = tensor
            continue
        for key, (shape, dtype, stored_dtype) in _part_headers(module, tensor, fmt).items():
            read = partial(read_part, module, key, tensor, fmt)
            result[key] = LazyTensor(shape, dtype, stored_dtype, math.prod(shape) * dtype.size, read)
    return result


def _part_headers(module: str, tensor: LazyTensor, fmt: Format) -> dict[str, tuple[tuple[int, int], mx.Dtype, str]]:
    """Tensor name -> shape, dtype and stored dtype of each part of a quantized matrix."""
    rows, width = tensor.shape
    parts = {"weight": ((rows, width * fmt.bits // 32), mx.uint32, "U32")}
    groups = (rows, width // fmt.group_size)
    if fmt.affine:
        parts |= dict.fromkeys(("scales", "biases"), (groups, tensor.dtype, tensor.stored_dtype))
    else:
        parts["scales"] = (groups, mx.uint8, "U8")
    return {f"{module}.{name}": header for name, header in parts.items()}
