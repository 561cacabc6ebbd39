"""MLX's packed quantized matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from mlxlm.backend.mlx import eval_in_parallel, mx
from mlxlm.checkpoint.safetensors import as_float32
from mlxlm.config.quantization import Format

_ROWS = 256  # packed at once: their bits take a byte each
_AT_ONCE = 1 << 21  # weights worked on at once


class PackedMatrix(NamedTuple):
    """A quantized matrix.

    Attributes:
        weight: uint32 `[rows, width · bits / 32]`.
        scales: `[rows, width / group_size]`.
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
    rows = max(1, _AT_ONCE // weight.shape[1])
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
