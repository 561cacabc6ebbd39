"""MLX's packed quantized matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from mlxlm.backend.mlx import eval_in_parallel, mx
from mlxlm.checkpoint.safetensors import as_float32
from mlxlm.quantize.quantization_plan import Format

_ROWS = 256  # packed at once: their bits take a byte each
_AT_ONCE = 1 << 21  # weights worked on at once


@dataclass(frozen=True)
class PackedMatrix:
    """A quantized matrix.

    Attributes:
        weight: uint32 `[rows, width · bits / 32]`.
        scales: `[rows, width / group_size]`.
        biases: Like `scales`; None unless the mode is affine.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array | None

    def parts(self, module: str) -> dict[str, mx.array]:
        """The arrays by tensor name."""
        parts = {f"{module}.weight": self.weight, f"{module}.scales": self.scales}
        return parts if self.biases is None else {**parts, f"{module}.biases": self.biases}

    def rows(self, start: int, stop: int) -> PackedMatrix:
        """Some rows of the matrix."""
        biases = None if self.biases is None else self.biases[start:stop]
        return PackedMatrix(self.weight[start:stop], self.scales[start:stop], biases)

    @classmethod
    def concatenate_rows(cls, pieces: Sequence[PackedMatrix]) -> PackedMatrix:
        """Join the rows of several matrices."""
        weight, scales = (mx.concatenate([getattr(piece, part) for piece in pieces]) for part in ("weight", "scales"))
        biases = None if pieces[0].biases is None else mx.concatenate([piece.biases for piece in pieces])
        return cls(weight, scales, biases)


def quantize_rtn(weight: mx.array, chosen: Format) -> PackedMatrix:
    """Round `weight` `[rows, width]` to nearest with mx.quantize; scales and biases have its dtype."""

    def some(start: int, stop: int) -> tuple[mx.array, ...]:
        return mx.quantize(weight[start:stop], group_size=chosen.group_size, bits=chosen.bits, mode=chosen.mode)

    pieces = eval_in_parallel(partial(some, *rows) for rows in _pieces(weight))
    return PackedMatrix.concatenate_rows([PackedMatrix(p[0], p[1], p[2] if chosen.affine else None) for p in pieces])


def dequantized(packed: PackedMatrix, chosen: Format) -> mx.array:
    """Dequantize to float32 `[rows, width]`, without intermediate rounding."""
    arguments = {"group_size": chosen.group_size, "bits": chosen.bits, "mode": chosen.mode}
    if not chosen.affine:
        return mx.dequantize(packed.weight, packed.scales, dtype=mx.float32, **arguments)
    return mx.dequantize(packed.weight, as_float32(packed.scales), as_float32(packed.biases), **arguments)


def weight_error(weight: mx.array, packed: PackedMatrix, chosen: Format) -> float:
    """Relative error |packed - weight| / |weight|."""

    def some(start: int, stop: int) -> tuple[mx.array, mx.array]:
        source = as_float32(weight[start:stop]).flatten()
        error = dequantized(packed.rows(start, stop), chosen).flatten() - source
        return source @ source, error @ error

    found = [
        (size.item(), error.item()) for size, error in eval_in_parallel(partial(some, *r) for r in _pieces(weight))
    ]
    size, error = map(math.fsum, zip(*found, strict=True))
    return math.sqrt(error / size) if size else 0.0


def _pieces(weight: mx.array) -> list[tuple[int, int]]:
    """(start, stop) of row ranges to process one by one: in float32 the whole matrix would take much memory."""
    rows = max(1, _AT_ONCE // weight.shape[1])
    return [(start, start + rows) for start in range(0, weight.shape[0], rows)]


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
