"""RMSNorm, alone and after a residual addition (Zhang & Sennrich 2019, "Root Mean Square Layer Normalization").

    rms_norm(x) = x / sqrt(mean(x²) + eps) · weight

over the last axis, in float32 whatever the dtypes. A row whose squares leave float32 (values above 1e19)
becomes 0, as in `mx.fast.rms_norm`; float16 never gets there. NaN spreads over its row.
"""

from __future__ import annotations

from typing import Any

from mlxlm.backend.mlx import mx
from mlxlm.kernels.dispatch import DTYPE_NAMES, Case, Operation
from mlxlm.kernels.rms_norm_metal import add_rms_norm_metal, rms_norm_metal

ROWS = (8, 512, 4096)  # decoding, prompts and training: a case has up to so many rows, the last one all that are more


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """The norm of x `[..., N]` by weight `[N]`, in the dtype that both promote to. Raises ValueError otherwise."""
    return NORM.implementation(_case(NORM, x, weight))(x, weight, eps)


def add_rms_norm(x: mx.array, residual: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """h = x + residual and rms_norm(h), x and residual `[..., N]`, weight `[N]`. Raises ValueError otherwise."""
    if residual.shape != x.shape or residual.dtype not in DTYPE_NAMES:
        raise ValueError(f"residual is {residual.shape} {residual.dtype}, but x is {x.shape} {x.dtype}")
    return ADD_NORM.implementation(_case(ADD_NORM, x, weight, residual))(x, residual, weight, eps)


def _add_rms_norm_mlx(x: mx.array, residual: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    h = x + residual
    return h, mx.fast.rms_norm(h, weight, eps)


def _case(operation: Operation, x: mx.array, weight: mx.array, residual: mx.array | None = None) -> Case:
    N = x.shape[-1] if x.ndim else 0
    dtype, size = x.dtype, x.size
    if weight.shape != (N,) or dtype not in DTYPE_NAMES or weight.dtype not in DTYPE_NAMES:
        arrays = f"x {x.shape} {dtype}, weight {weight.shape} {weight.dtype}"
        raise ValueError(f"a norm takes [..., N] and [N] of float32, float16 or bfloat16: {arrays}")
    rows = ROWS[0] if size <= ROWS[0] * N else ROWS[1] if size <= ROWS[1] * N else ROWS[2]
    mixed = ()
    if weight.dtype != dtype:
        mixed += (f"weight:{DTYPE_NAMES[weight.dtype]}",)
    if residual is not None and residual.dtype != dtype:
        mixed += (f"residual:{DTYPE_NAMES[residual.dtype]}",)
    return norm_case(operation, DTYPE_NAMES[dtype], N, rows, mixed)


def norm_case(operation: Operation, dtype: str, N: int, rows: int, mixed: tuple[str, ...] = ()) -> Case:
    """`rows` is one of ROWS, `mixed` names what has another dtype: "weight:float32"."""
    return Case(operation.name, dtype, ("N", "rows"), (N, rows), mixed)


def _trial(case: Case) -> tuple[list[Any], dict[str, Any]]:
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


def _small(case: Case) -> tuple[Case, ...]:
    """One row, and enough that a team of threads has several."""
    return case.with_sizes(rows=1), case.with_sizes(rows=301)


def _prefers_add(case: Case):
    if case.size("rows") == ROWS[0]:
        return ("mlx", "metal"), "few rows: MLX's own until measured"
    return ("metal", "mlx"), "MLX does it in two passes"


NORM = Operation(
    "rms_norm",
    {"mlx": mx.fast.rms_norm, "metal": rms_norm_metal},
    lambda case: (("mlx", "metal"), "MLX's own"),
    _trial,
    _small,
    differentiable=(0, 1),
)
ADD_NORM = Operation(
    "add_rms_norm",
    {"mlx": _add_rms_norm_mlx, "metal": add_rms_norm_metal},
    _prefers_add,
    _trial,
    _small,
    differentiable=(0, 1, 2),
)
