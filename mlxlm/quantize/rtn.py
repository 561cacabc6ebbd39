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


class FloatFormat(NamedTuple):
    """A floating-point format of weights with 8-bit scales.

    Attributes:
        group_size: Weights that share a scale.
        largest: The largest value of a weight that is divided by its scale.
        encode: Rounds weights that are divided by their scales; returns their packed bytes and the rounded values.
        encode_scale: Code of a scale near the given one.
        decode_scale: The scale of a code.
        offsets: The codes to try, relative to that of the scale that represents the largest weight of a group.
        codes: The smallest and the largest code.
    """

    group_size: int
    largest: float
    encode: Callable[[mx.array], tuple[mx.array, mx.array]]
    encode_scale: Callable[[mx.array], mx.array]
    decode_scale: Callable[[mx.array], mx.array]
    offsets: Sequence[int]
    codes: tuple[int, int]

    def quantize(self, weight: mx.array) -> PackedMatrix:
        """Quantize weights `[..., width]`, each group with its best scale."""
        groups = mx.unflatten(as_float32(weight), -1, (-1, self.group_size))
        codes = self.best_scales(groups)
        return self.pack((groups / self.decode_scale(codes)[..., None]).flatten(-2), codes)

    def best_scales(self, groups: mx.array) -> mx.array:
        """The codes of the scales with the smallest squared error.

        Powers of two (Rouhani et al. 2023, arXiv:2310.10537): the smallest scale that can represent the largest weight,
        as in MLX, or half of it, which clips the largest weights and halves the error of the others; no other one is
        better. E4M3: 13 scales, from about 0.7 to 2 times the one that MLX chooses. The best of all has at most 0.1 %
        less error.

        Args:
            groups: float32 `[..., group_size]`.

        Returns:
            int32 `[...]`.
        """
        peak = mx.abs(groups).max(axis=-1, keepdims=True) / self.largest
        nearest = mx.clip(self.encode_scale(peak).astype(mx.int32), *self.codes)
        unit = self.decode_scale(nearest)  # of the errors: squares of weights can underflow
        best, smallest = nearest, mx.array(mx.inf)
        for offset in self.offsets:
            code = mx.clip(nearest + offset, *self.codes)
            scale = self.decode_scale(code)
            error = mx.square((self.nearest(groups / scale) * scale - groups) / unit).sum(axis=-1, keepdims=True)
            best, smallest = mx.where(error < smallest, code, best), mx.minimum(error, smallest)
        return best.squeeze(-1)

    def nearest(self, x: mx.array) -> mx.array:
        """The nearest values."""
        return self.encode(mx.clip(x, -self.largest, self.largest))[1]

    def pack(self, x: mx.array, codes: mx.array) -> PackedMatrix:
        """Pack weights that are divided by their scales, `[..., width]`, with the codes of these, `[..., groups]`."""
        packed, _ = self.encode(mx.clip(x, -self.largest, self.largest))
        return PackedMatrix(packed.view(mx.uint32), codes.astype(mx.uint8))


def quantize_rtn(weight: mx.array, chosen: Format) -> PackedMatrix:
    """Round `weight` `[..., width]` to nearest; scales and biases have its dtype.

    As mlx_lm.convert does, except for floating-point formats: their scales are those with the smallest squared error.
    """
    quantize = partial(mx.quantize, **chosen.to_dict()) if chosen.affine else FLOAT_FORMATS[chosen.mode].quantize
    pieces = eval_in_parallel(partial(quantize, weight[rows]) for rows in row_pieces(weight))
    return PackedMatrix.concatenate_rows([PackedMatrix(*piece) for piece in pieces])


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
    return codes, _decode_fp8(codes)


def _decode_fp8(codes: mx.array) -> mx.array:
    return mx.from_fp8(codes.astype(mx.uint8), dtype=mx.float32)


def _encode_power(scale: mx.array) -> mx.array:
    """The exponent of the next power of two that isn't smaller, plus 127, from 1 to 253."""
    return mx.clip((scale.view(mx.int32) + 0x7FFFFF) >> 23, 1, 253)


def _decode_power(code: mx.array) -> mx.array:
    return (code << 23).view(mx.float32)


_POWERS = (_encode_power, _decode_power, (0, -1), (1, 253))
FLOAT_FORMATS = {
    "mxfp4": FloatFormat(32, 6.0, _encode_fp4, *_POWERS),
    "mxfp8": FloatFormat(32, 448.0, _encode_fp8, *_POWERS),
    "nvfp4": FloatFormat(
        16, 6.0, _encode_fp4, lambda scale: mx.to_fp8(mx.minimum(scale, 448)), _decode_fp8, range(-4, 9), (1, 126)
    ),
}


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
