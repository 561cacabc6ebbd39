"""GPTQ (Frantar et al. 2022, arXiv:2210.17323) for MLX's affine format.

A layer's weights are rounded column by column. The columns that are not yet rounded compensate for the change of the
layer's output, by the inverse of the inputs' second moments.
"""

from __future__ import annotations

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.safetensors import as_float32
from mlxlm.config.quantization import Format
from mlxlm.quantize.calibrate import CalibratedMethod, InputStats
from mlxlm.quantize.rtn import PackedMatrix, dequantized, pack, quantize_rtn
from mlxlm.utils.errors import CheckpointError

DAMPING = 0.01  # of the mean diagonal, as in the paper
# Share of the change of a layer's inputs by earlier layers that it compensates for, as in GPTAQ (Li et al. 2025,
# arXiv:2504.02692). For a trained model of 0.4M parameters in 3 bits: KL 0.078 for 0, 0.068 for 0.5, and 0.076 for 1,
# since later layers compensate for the same change.
CORRECTION = np.float32(0.5)
# Shares of a group's range to try; outliers beyond are clipped.
CLIP_RATIOS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65)


def gptq(
    weight: mx.array,
    moments: np.ndarray,
    fmt: Format,
    dxxt: np.ndarray | None = None,
    factor: np.ndarray | None = None,
) -> PackedMatrix:
    """Quantize a matrix so that its outputs for the calibration inputs X change least.

    Scales and biases are those that MLX computes for a group when its columns are reached, or those of a narrower range
    if the error is smaller. A row for which rounding to nearest is better keeps it, so calibration is never worse. A
    matrix whose inputs were always zero is rounded to nearest.

    Args:
        weight: 16-bit weights `[rows, width]`; scales and biases get its dtype.
        moments: XᵀX, float32 `[width, width]`.
        fmt: An affine format.
        dxxt: (X₀ - X)ᵀX with the inputs X₀ in the unquantized model. The target is then the output for the inputs
            X + CORRECTION · (X₀ - X).
        factor: `inverse_hessian_cholesky(moments)`, to share it between matrices.

    Raises:
        CheckpointError: The moments are not finite.
    """
    plain = quantize_rtn(weight, fmt)
    if factor is None:
        factor = inverse_hessian_cholesky(moments)
    if not factor.any():
        return plain
    if dxxt is not None and not np.isfinite(dxxt).all():
        raise CheckpointError("the calibration inputs are not finite", "another calibration text, or check the weights")
    aim = as_numpy(weight)
    if dxxt is not None:
        aim += CORRECTION * ((aim @ dxxt) @ factor.T) @ factor / _mean(moments)
    values, scales, biases = _columns(aim, factor, fmt, weight.dtype)
    own = PackedMatrix(pack(values, fmt.bits), *(mx.array(part).astype(weight.dtype) for part in (scales, biases)))
    own_errors, plain_errors = (row_errors(aim, packed, fmt, moments) for packed in (own, plain))
    better = mx.array(own_errors < plain_errors)[:, None]
    return PackedMatrix(*(mx.where(better, a, b) for a, b in zip(own, plain, strict=True)))


def row_errors(weight: np.ndarray, packed: PackedMatrix, fmt: Format, moments: np.ndarray) -> np.ndarray:
    """Squared change of each row's output on the calibration inputs, diag(ΔW · XᵀX · ΔWᵀ) `[rows]`."""
    change = as_numpy(dequantized(packed, fmt)) - weight
    return np.einsum("ij,ij->i", change @ moments, change)


def output_error(weight: mx.array, packed: PackedMatrix, fmt: Format, moments: np.ndarray) -> np.ndarray:
    """|ΔW X|² and |W X|² on the calibration inputs, float64 `[2]`."""
    source = as_numpy(weight)
    return np.array([row_errors(source, packed, fmt, moments).sum(), np.vdot(source @ moments, source)], np.float64)


def as_numpy(value: mx.array) -> np.ndarray:
    """A float32 copy."""
    return np.array(as_float32(value))


def _mean(moments: np.ndarray) -> np.float32:
    return np.float32(np.mean(np.diag(moments)))


def inverse_hessian_cholesky(moments: np.ndarray) -> np.ndarray:
    """The upper triangular U with UᵀU = (H + damping)⁻¹, where H is `moments` divided by their mean diagonal.

    With H = R Rᵀ, R upper triangular (a Cholesky factor from the last column on), U is R⁻¹. MLX's LAPACK calls use the
    fast library that the package loads: 0.2 s for 2048 columns on two cores, numpy's take 3 s.

    Returns:
        float32 `[width, width]`; zeros if the inputs were always zero.

    Raises:
        CheckpointError: The moments are not finite, or not positive definite.
    """
    if not np.isfinite(moments).all():
        raise CheckpointError("the calibration inputs are not finite", "another calibration text, or check the weights")
    mean, width, damping = _mean(moments), len(moments), DAMPING
    if mean == 0:
        return np.zeros_like(moments)
    probe = np.random.default_rng(0).normal(size=width).astype(np.float32)
    while damping <= 1:
        reverse = moments[::-1, ::-1] / mean
        reverse.flat[:: width + 1] += np.float32(damping)
        lower = mx.linalg.cholesky(mx.array(reverse), stream=mx.cpu)
        del reverse  # each of these is as large as the moments, which are the largest thing there is
        factor = np.array(mx.linalg.tri_inv(lower, stream=mx.cpu), copy=False)[::-1, ::-1]
        # MLX doesn't say when a matrix isn't positive in float32; U (H + damping) Uᵀ = 1 does.
        back = factor.T @ probe
        if np.allclose(factor @ (moments @ back / mean + damping * back), probe, atol=0.05):
            return factor
        damping *= 10
    raise CheckpointError("the moments of the calibration inputs are not positive definite", "another calibration text")


def _columns(
    weight: np.ndarray, factor: np.ndarray, fmt: Format, dtype: mx.Dtype
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The quantized values `[rows, width]`, and scales and biases `[rows, groups]`, float32 as the dtype rounds them.

    A group of columns is finished by vectors, then all columns after it are corrected by one product.
    """
    rows, width = weight.shape
    size, top = fmt.group_size, 2**fmt.bits - 1
    left = np.ascontiguousarray(weight.T)  # a column of the matrix is a row here, in one piece
    values = np.empty((width, rows), np.uint8)
    scales, biases = (np.empty((rows, width // size), np.float32) for _ in range(2))
    errors = np.empty((size, rows), np.float32)
    for group, start in enumerate(range(0, width, size)):
        end = start + size
        own = left[start:end]
        corner = factor[start:end, start:end]
        scale, bias = _range(own.T, 1 / np.diag(corner) ** 2, fmt, dtype)
        scales[:, group], biases[:, group] = scale, bias
        divisor = np.where(scale == 0, 1, scale)  # underflow: the value is then the bias, whatever the number
        for column in range(size):
            whole = np.clip(np.rint((own[column] - bias) / divisor), 0, top)
            values[start + column] = whole
            error = (own[column] - (whole * scale + bias)) / corner[column, column]
            own[column + 1 :] -= corner[column, column + 1 :, None] * error
            errors[column] = error
        left[end:] -= factor[start:end, end:].T @ errors
    return values.T, scales, biases


def _range(group: np.ndarray, importance: np.ndarray, fmt: Format, dtype: mx.Dtype) -> tuple[np.ndarray, np.ndarray]:
    """Scale and bias for each row of `group` `[rows, group_size]`.

    Of MLX's for each of `CLIP_RATIOS`, the pair with the smallest squared error, columns weighted by `importance`.
    """
    values, weights = mx.array(np.ascontiguousarray(group)), mx.array(importance.astype(np.float32))
    low, high = values.min(axis=1, keepdims=True), values.max(axis=1, keepdims=True)
    best = (mx.array(mx.inf), low, low)  # error, scale, bias
    for part in CLIP_RATIOS:
        clipped = mx.clip(values, part * low, part * high).astype(dtype)
        packed = quantize_rtn(clipped, fmt)
        scale, bias = as_float32(packed.scales), as_float32(packed.biases)
        divisor = mx.where(scale == 0, 1, scale)
        whole = mx.clip(mx.round((values - bias) / divisor), 0, 2**fmt.bits - 1)
        error = (mx.square(whole * scale + bias - values) * weights).sum(axis=1, keepdims=True)
        better = error < best[0]
        best = (mx.where(better, error, best[0]), mx.where(better, scale, best[1]), mx.where(better, bias, best[2]))
    mx.eval(best)
    return np.array(best[1])[:, 0], np.array(best[2])[:, 0]


class GPTQ(CalibratedMethod):
    """Compensates for rounding, and for the change of the inputs by the layers before."""

    runs_source = True

    def __init__(self) -> None:
        self._factor: tuple[InputStats, np.ndarray] | None = None  # the last one: query, key and value share it

    def quantize(self, module: str, weight: mx.array, inputs: InputStats, fmt: Format) -> PackedMatrix:
        """Round column by column."""
        if self._factor is None or self._factor[0] is not inputs:
            self._factor = None  # free it before the next one is computed
            self._factor = inputs, inverse_hessian_cholesky(inputs.moments)
        return gptq(weight, inputs.moments, fmt, inputs.dxxt, factor=self._factor[1])

    def end_block(self) -> None:
        """Free the factor, which is as large as the moments."""
        self._factor = None
