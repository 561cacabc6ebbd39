"""MLX's packed quantized matrices, and rounding to nearest (RTN).

RTN quantizes tensors when they are read, from disk to disk in constant memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from mlxlm.backend.mlx import eval_in_parallel, mx
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors
from mlxlm.checkpoint.safetensors import as_float32
from mlxlm.config.quantization import Format
from mlxlm.quantize.quantization_plan import QuantizationPlan

_ROWS = 256  # packed at once: their bits take a byte each
_AT_ONCE = 1 << 21  # weights worked on at once


class PackedMatrix(NamedTuple):
    """A quantized matrix.

    Attributes:
        weight: uint32 `[rows, width · bits / 32]`; for a stack of matrices `[experts, rows, width · bits / 32]`.
        scales: `[..., width / group_size]`.
        biases: Like `scales`; None unless the mode is affine.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array | None = None

    def parts(self, module: str) -> dict[str, mx.array]:
        """The arrays by tensor name."""
        return {f"{module}.{name}": part for name, part in self._asdict().items() if part is not None}

    @classmethod
    def concatenate_rows(cls, pieces: Sequence[PackedMatrix]) -> PackedMatrix:
        """Join the rows of several matrices."""
        return cls(*(None if parts[0] is None else mx.concatenate(parts) for parts in zip(*pieces, strict=True)))

    @classmethod
    def stack(cls, matrices: Sequence[PackedMatrix]) -> PackedMatrix:
        """Stack the matrices of several experts."""
        return cls(*(None if parts[0] is None else mx.stack(parts) for parts in zip(*matrices, strict=True)))


def dequantized(packed: PackedMatrix, chosen: Format) -> mx.array:
    """Dequantize to float32 `[rows, width]`, without intermediate rounding."""
    if packed.biases is None:
        return mx.dequantize(packed.weight, packed.scales, dtype=mx.float32, **chosen.to_dict())
    return mx.dequantize(packed.weight, as_float32(packed.scales), as_float32(packed.biases), **chosen.to_dict())


def weight_error(weight: mx.array, packed: PackedMatrix, chosen: Format) -> float:
    """Relative error |packed - weight| / |weight|."""

    def squares(rows: slice) -> tuple[mx.array, mx.array]:
        source = as_float32(weight[rows]).flatten()
        piece = PackedMatrix(*(None if part is None else part[rows] for part in packed))
        error = dequantized(piece, chosen).flatten() - source
        return source @ source, error @ error

    sums = eval_in_parallel(partial(squares, rows) for rows in row_pieces(weight))
    size, error = (math.fsum(value.item() for value in values) for values in zip(*sums, strict=True))
    return math.sqrt(error / size) if size else 0.0


def row_pieces(weight: mx.array) -> list[slice]:
    """Ranges of rows to process one by one: in float32 the whole matrix would take much memory."""
    rows = max(1, _AT_ONCE // math.prod(weight.shape[1:]))
    return [slice(start, start + rows) for start in range(0, weight.shape[0], rows)]


def pack(values: np.ndarray, bits: int) -> mx.array:
    """Pack integers below 2^bits, `[rows, width]`, like MLX: uint32 `[rows, width · bits / 32]`.

    A row is one stream of bits, the lowest first. So it is for 3, 5 and 6 bits too, which MLX writes byte by
    byte in packs of three or five (mlx/backend/cpu/quantized.cpp, `quantize`).
    """
    rows, width = values.shape
    packed = np.empty((rows, width * bits // 8), np.uint8)
    for start in range(0, rows, _ROWS):
        part = values[start : start + _ROWS].astype(np.uint8)[..., None]
        stream = np.unpackbits(part, axis=-1, count=bits, bitorder="little").reshape(len(part), -1)
        packed[start : start + _ROWS] = np.packbits(stream, axis=-1, bitorder="little")
    return mx.array(packed.view("<u4"))


OnMatrix = Callable[[str, mx.array, PackedMatrix, Format], None]


def quantize_rtn(weight: mx.array, chosen: Format) -> PackedMatrix:
    """Round `weight` `[..., width]` to nearest as mlx_lm.convert does; scales and biases have its dtype."""
    pieces = eval_in_parallel(partial(mx.quantize, weight[rows], **chosen.to_dict()) for rows in row_pieces(weight))
    return PackedMatrix.concatenate_rows([PackedMatrix(*piece) for piece in pieces])


def lazy_quantize(
    tensors: LazyTensors, plan: QuantizationPlan, on_matrix: OnMatrix | None = None
) -> dict[str, LazyTensor]:
    """Round the matrices of `plan` to nearest when they are read.

    The parts of a matrix (weight, scales, biases) are computed together and kept until each was read once, as writers
    read them one after the other.

    Args:
        tensors: The model's tensors in 16 bits.
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


def _part_headers(module: str, tensor: LazyTensor, fmt: Format) -> dict[str, tuple[tuple[int, ...], mx.Dtype, str]]:
    """Tensor name -> shape, dtype and stored dtype of each part of a quantized matrix."""
    *rows, width = tensor.shape
    parts: dict[str, tuple[tuple[int, ...], mx.Dtype, str]] = {
        "weight": ((*rows, width * fmt.bits // 32), mx.uint32, "U32")
    }
    groups = (*rows, width // fmt.group_size)
    if fmt.affine:
        parts |= dict.fromkeys(("scales", "biases"), (groups, tensor.dtype, tensor.stored_dtype))
    else:
        parts["scales"] = (groups, mx.uint8, "U8")
    return {f"{module}.{name}": header for name, header in parts.items()}
