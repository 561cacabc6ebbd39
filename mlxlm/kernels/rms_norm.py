"""RMSNorm, alone and after a residual addition (Zhang & Sennrich 2019, "Root Mean Square Layer Normalization").

    rms_norm(x) = x / sqrt(mean(x²) + eps) · weight

over the last axis, in float32 whatever the dtypes. A row whose squares leave float32 (values above 1e19)
becomes 0, as in `mx.fast.rms_norm`; float16 never gets there. NaN spreads over its row.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from mlxlm._mlx import ON_CPU, mx
from mlxlm.kernels.dispatch import DTYPE_NAMES, Case, Operation
from mlxlm.kernels.rms_norm_metal import add_rms_norm_metal, rms_norm_metal

ROWS = (8, 512, 4096)  # decoding, prompts and training: a case has up to so many rows, the last one all that are more
_SIZES = ("N", "rows")
_CPU_LEAST = 4096  # values from which the products of `_rms_norm_cpu` pay


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """The norm of x `[..., N]` by weight `[N]`, in the dtype that both promote to. Raises ValueError otherwise."""
    return NORM.implementation(_case(NORM, x, weight))(x, weight, eps)


def add_rms_norm(x: mx.array, residual: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """h = x + residual and rms_norm(h), x and residual `[..., N]`, weight `[N]`. Raises ValueError otherwise."""
    if residual.shape != x.shape or residual.dtype not in DTYPE_NAMES:
        raise ValueError(f"residual is {residual.shape} {residual.dtype}, but x is {x.shape} {x.dtype}")
    return ADD_NORM.implementation(_case(ADD_NORM, x, weight, residual))(x, residual, weight, eps)


def rms_norm_mlx(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """`rms_norm` of MLX's own operations."""
    if ON_CPU and x.dtype == weight.dtype == mx.float32 and x.size >= _CPU_LEAST:
        return _rms_norm_cpu(eps)(x, weight)
    return mx.fast.rms_norm(x, weight, eps)


def add_rms_norm_mlx(x: mx.array, residual: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """`add_rms_norm` of MLX's own operations."""
    h = x + residual
    return h, rms_norm_mlx(h, weight, eps)


@cache
def _rms_norm_cpu(eps: float):
    """On the CPU backend: sums over rows and products by row as BLAS products.

    MLX's loop over a `[R, 1]` beside a `[R, N]` operand is slow there: at 2048 rows of 256 values, 1.55 ms
    for its norm, 0.19 for this one, and 1.7 against 0.7 with the gradient (of a compiled graph, two cores).
    """

    @mx.custom_function
    def norm(x, weight):
        rows = x.reshape(-1, x.shape[-1])
        return (rows * (_inverse(rows, eps) @ weight[None])).reshape(x.shape)

    @norm.vjp
    def gradient(primals, dy, _output):
        x, weight = primals
        N = x.shape[-1]
        rows, dy = x.reshape(-1, N), dy.reshape(-1, N)
        inverse = _inverse(rows, eps)
        product = dy * rows
        mean = (product @ weight[:, None]) * (inverse / N) * inverse * inverse
        dx = dy * (inverse @ weight[None]) - rows * (mean @ mx.ones((1, N)))
        return dx.reshape(x.shape), (inverse.T @ product)[0]

    return norm


def _inverse(rows: mx.array, eps: float) -> mx.array:
    """1 / sqrt(mean(x²) + eps) of rows `[R, N]`, as `[R, 1]`."""
    N = rows.shape[1]
    return mx.rsqrt(rows.square() @ mx.full((N, 1), 1 / N) + eps)


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
    return Case(operation.name, DTYPE_NAMES[dtype], _SIZES, (N, rows), mixed)


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
    return case.resized(rows=1), case.resized(rows=301)


def _prefers_add(case: Case):
    if case.size("rows") == ROWS[0]:
        return ("mlx", "metal"), "a few rows: launches cost more than bytes"
    return ("metal", "mlx"), "MLX does it in two passes"


NORM = Operation(
    "rms_norm",
    {"mlx": rms_norm_mlx, "metal": rms_norm_metal},
    lambda case: (("mlx", "metal"), "MLX's own"),
    _trial,
    _small,
    differentiable=(0, 1),
)
ADD_NORM = Operation(
    "add_rms_norm",
    {"mlx": add_rms_norm_mlx, "metal": add_rms_norm_metal},
    _prefers_add,
    _trial,
    _small,
    differentiable=(0, 1, 2),
)
