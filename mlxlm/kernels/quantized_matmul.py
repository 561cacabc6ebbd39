"""Products with quantized matrices: MLX's, and on a CPU those of quantized_matmul.cpp."""

from __future__ import annotations

from typing import Any

from mlxlm.backend.cpu_extension import load_extension
from mlxlm.backend.mlx import mx


def multiplies_on_cpu(group_size: int | None, mode: str, **_bits: int | None) -> bool:
    """Whether a CPU multiplies matrices of a format without dequantizing them. None is MLX's default: 64, if affine."""
    return load_extension().module is not None and mode == "affine" and (group_size or 64) % 32 == 0


def quantized_matmul(
    x: mx.array,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array | None,
    matrices: mx.array | None = None,
    **format: Any,
) -> mx.array:
    """Multiply `x` by the transposes of quantized matrices.

    Args:
        x: `[..., input]`, or with `matrices` `[B, T, input]`. On a CPU float32, if it has a kernel for the format.
        weight: uint32 `[output, input · bits / 32]`, or with `matrices` a stack of them.
        scales: As from `mx.quantize`.
        biases: The same.
        matrices: The index of the matrix for each of B blocks, uint32 `[B]`.
        **format: `group_size`, `bits` and `mode`.

    Returns:
        `[..., output]`, the same as of `mx.quantized_matmul` and `mx.gather_qmm`, but for rounding.
    """
    if not (x.dtype == mx.float32 and multiplies_on_cpu(**format)):
        if matrices is None:
            return mx.quantized_matmul(x, weight, scales, biases, transpose=True, **format)
        return mx.gather_qmm(
            x, weight, scales, biases, rhs_indices=matrices, transpose=True, sorted_indices=True, **format
        )
    multiply = load_extension().module.quantized_matmul  # type: ignore[union-attr]
    return multiply(x, weight, scales, biases, matrices, format["group_size"] or 64, format["bits"] or 4)
