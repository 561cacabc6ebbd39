"""RMSNorm, alone and after a residual addition (Zhang & Sennrich 2019, "Root Mean Square Layer Normalization").

    rms_norm(x) = x / sqrt(mean(x²) + eps) · weight

over the last axis, computed in float32 for all dtypes. If the squares of a row overflow float32 (values above 1e19),
the row becomes 0, as in `mx.fast.rms_norm`. A NaN makes its whole row NaN.
"""

from __future__ import annotations

from typing import Any

from mlxlm.backend.mlx import mx
from mlxlm.kernels.dispatch import DTYPE_NAMES, Case, Operation
from mlxlm.kernels.rms_norm_metal import add_rms_norm_metal, rms_norm_metal

_ROWS = (8, 512, 4096)  # rows of the cases, rounded up: decoding, prefill, training (which has no limit)


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Compute RMSNorm.

    Args:
        x: `[..., N]`, float32, float16 or bfloat16.
        weight: `[N]`.
        eps: Added to the mean square.

    Returns:
        `[..., N]` in the dtype that x and weight promote to.

    Raises:
        ValueError: Shapes or dtypes are invalid.
    """
    return NORM.implementation(_case(NORM, x, weight))(x, weight, eps)


def add_rms_norm(x: mx.array, residual: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """Compute h = x + residual and rms_norm(h).

    Args:
        x: `[..., N]`, float32, float16 or bfloat16.
        residual: `[..., N]`.
        weight: `[N]`.
        eps: Added to the mean square.

    Returns:
        h and rms_norm(h), `[..., N]`.

    Raises:
        ValueError: Shapes or dtypes are invalid.
    """
    if residual.shape != x.shape or residual.dtype not in DTYPE_NAMES:
        raise ValueError(f"residual is {residual.shape} {residual.dtype}, but x is {x.shape} {x.dtype}")
    case = _case(ADD_NORM, x, weight, residual)
    if not x.size:  # a kernel needs a thread
        return _add_rms_norm_mlx(x, residual, weight, eps)
    return ADD_NORM.implementation(case)(x, residual, weight, eps)


def _add_rms_norm_mlx(x: mx.array, residual: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    h = x + residual
    return h, mx.fast.rms_norm(h, weight, eps)


def _case(operation: Operation, x: mx.array, weight: mx.array, residual: mx.array | None = None) -> Case:
    N = x.shape[-1] if x.ndim else 0
    dtype, size = x.dtype, x.size
    if weight.shape != (N,) or dtype not in DTYPE_NAMES or weight.dtype not in DTYPE_NAMES:
        arrays = f"x {x.shape} {dtype}, weight {weight.shape} {weight.dtype}"
        raise ValueError(f"RMSNorm requires [..., N] and [N] of float32, float16 or bfloat16: {arrays}")
    rows = _ROWS[0] if size <= _ROWS[0] * N else _ROWS[1] if size <= _ROWS[1] * N else _ROWS[2]
    # Arrays with another dtype than x, such as "weight:float32".
    mixed: tuple[str, ...] = ()
    if weight.dtype != dtype:
        mixed += (f"weight:{DTYPE_NAMES[weight.dtype]}",)
    if residual is not None and residual.dtype != dtype:
        mixed += (f"residual:{DTYPE_NAMES[residual.dtype]}",)
    return Case(operation.name, DTYPE_NAMES[dtype], ("N", "rows"), (N, rows), mixed)


def _sample_inputs(case: Case) -> tuple[list[Any], dict[str, Any]]:
    rows, N = case.size("rows"), case.size("N")
    dtypes = dict(feature.split(":") for feature in case.features)
    shapes = {"x": (rows, N), "residual": (rows, N), "weight": (N,)}
    if case.operation == NORM.name:
        del shapes["residual"]
    seeds = mx.random.split(mx.random.key(0), 3)
    arrays = [
        mx.random.normal(shape, key=seed).astype(getattr(mx, dtypes.get(name, case.dtype)))
        for seed, (name, shape) in zip(seeds, shapes.items(), strict=False)
    ]
    return [*arrays, 1e-5], {}


def _check_cases(case: Case) -> tuple[Case, ...]:
    """One row, and enough rows that a team of threads has several."""
    return case.with_sizes(rows=1), case.with_sizes(rows=301)


NORM = Operation(
    "rms_norm",
    {"mlx": mx.fast.rms_norm, "metal": rms_norm_metal},
    lambda case: (("mlx", "metal"), "MLX's own"),
    _sample_inputs,
    _check_cases,
    differentiable=(0, 1),
)
ADD_NORM = Operation(
    "add_rms_norm",
    {"mlx": _add_rms_norm_mlx, "metal": add_rms_norm_metal},
    lambda case: (("metal", "mlx"), "MLX needs two launches and reads the sum again"),
    _sample_inputs,
    _check_cases,
    differentiable=(0, 1, 2),
)
