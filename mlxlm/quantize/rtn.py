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
    """Round `weight` `[..., width]` to nearest; scales and biases have its dtype.

    As mlx_lm.convert does, except for mxfp4 and mxfp8: their scales are those with the smallest squared error.
    """
    quantize = partial(mx.quantize, **chosen.to_dict())
    if chosen.mode in _MICROSCALING:
        quantize = partial(_quantize_microscaling, *_MICROSCALING[chosen.mode])
    pieces = eval_in_parallel(partial(quantize, weight[rows]) for rows in row_pieces(weight))
    return PackedMatrix.concatenate_rows([PackedMatrix(*piece) for piece in pieces])


def _quantize_microscaling(
    encode: Callable[[mx.array], tuple[mx.array, mx.array]], largest: float, weight: mx.array
) -> tuple[mx.array, mx.array]:
    """Quantize groups of 32 weights with a power of two as scale (Rouhani et al. 2023, arXiv:2310.10537).

    A group gets the smallest scale that can represent its largest weight, as in MLX, or half of it if the squared error
    is smaller: then the largest weights are clipped, and the others have half the error.

    Args:
        encode: Rounds weights that are divided by their scales; returns their packed bytes and the rounded values.
        largest: The largest value of the number format.
        weight: `[..., width]`.

    Returns:
        uint32 `[..., width · bits / 32]`, and the exponents of the scales plus 127, uint8 `[..., width / 32]`.
    """
    groups = mx.unflatten(as_float32(weight), -1, (-1, 32))
    peak = mx.abs(groups).max(axis=-1, keepdims=True) / largest
    exponent = mx.clip(mx.ceil(mx.log2(peak)), -126, 126).astype(mx.int32)
    results = []
    for scale in (exponent, exponent - 1):
        scaled = groups * (127 - scale << 23).view(mx.float32)  # · 2^-scale
        packed, rounded = encode(mx.clip(scaled, -largest, largest))
        results.append((packed, mx.square(rounded - scaled).sum(axis=-1, keepdims=True)))
    (packed, error), (half_packed, half_error) = results
    halve = half_error < 4 * error  # each in units of its scale
    packed = mx.where(halve, half_packed, packed).flatten(-2).view(mx.uint32)
    return packed, (exponent + 127 - halve).squeeze(-1).astype(mx.uint8)


def _encode_fp4(x: mx.array) -> tuple[mx.array, mx.array]:
    """E2M1: 0, 0.5, 1, 1.5, 2, 3, 4 and 6, with a sign; two in a byte, the first one in the lower half."""
    size = mx.abs(x)
    step = mx.where(size < 2, 0.5, mx.where(size < 4, 1.0, 2.0))
    rounded = mx.round(size / step) * step
    codes = mx.where(rounded <= 2, 2 * rounded, mx.where(rounded <= 4, rounded + 2, 7)) + 8 * (x < 0)
    codes = codes.astype(mx.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, mx.where(x < 0, -rounded, rounded)


def _encode_fp8(x: mx.array) -> tuple[mx.array, mx.array]:
    """E4M3."""
    codes = mx.to_fp8(x)
    return codes, mx.from_fp8(codes, dtype=mx.float32)


_MICROSCALING = {"mxfp4": (_encode_fp4, 6.0), "mxfp8": (_encode_fp8, 448.0)}


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
