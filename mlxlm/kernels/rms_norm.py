"""RMSNorm, alone and after a residual addition (Zhang & Sennrich 2019, "Root Mean Square Layer Normalization").

    rms_norm(x) = x / sqrt(mean(x²) + eps) · weight

over the last axis, computed in float32 for all dtypes. If the squares of a row overflow float32 (values above 1e19),
the row becomes 0, as in `mx.fast.rms_norm`. A NaN makes its whole row NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from mlxlm.backend.mlx import mx
from mlxlm.kernels.dispatch import DTYPE_NAMES, Case, Operation
from mlxlm.kernels.metal import MetalKernel, scalar

_NORM = MetalKernel("rms_norm", inputs=("x", "weight", "eps"), outputs=("y",))
_ADD_NORM = MetalKernel("add_rms_norm", inputs=("x", "residual", "weight", "eps"), outputs=("h", "y"))
_GRADIENT = MetalKernel("rms_norm_grad", inputs=("x", "weight", "dy", "dh", "eps"), outputs=("dx", "dw"))

# A forward thread keeps the values and weights of its runs in registers, a gradient thread also gradients and column
# sums. The 208 KB of registers of a GPU core are 104 for each of 512 threads, and 128, the most that a thread can have,
# for 384: MLX raises an error if a threadgroup has more threads than the compiled kernel allows. Rows of up to 16384
# (forward) and 8192 values (gradient) are read once, longer ones twice.
_THREADS = 512
_SAFE_THREADS = 384  # with any number of registers
_FORWARD_CHUNKS, _GRADIENT_CHUNKS = 8, 4
_NARROW = 512  # up to this many values, one SIMD group processes a row; a threadgroup has four SIMD groups
# A team processes many rows, so that reading the weight (forward) and writing its part of the weight's gradient cost
# little in comparison. But first there must be enough teams to fill the GPU.
_FORWARD_ROWS, _FORWARD_TEAMS = 16, 128
_GRADIENT_ROWS, _GRADIENT_TEAMS = 32, 128


def rms_norm_metal(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Compute `rms_norm`, which checks the arguments, with kernels that read each row once, also in the gradient."""
    return _rms_norm_metal(eps)(x, weight)


def add_rms_norm_metal(x: mx.array, residual: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """Compute `add_rms_norm`, which checks the arguments, in one pass over the rows.

    The norm is that of h after rounding to its dtype. The backward pass also adds the gradient of h from its other
    users in the same pass.
    """
    return _add_rms_norm_metal(eps)(x, residual, weight)


def _teams(x: mx.array, max_chunks: int, max_rows: int, min_teams: int) -> tuple[int, dict[str, int], dict[str, Any]]:
    """Choose how threads share the rows of x `[rows, N]` (see `rms_norm.metal`).

    A team processes up to `max_rows` rows; there are `min_teams` teams if there are enough rows.

    Returns:
        The number of teams, the template arguments CHUNKS (runs of four values per thread), WIDE (whether a team is a
        threadgroup instead of a SIMD group) and EXACT (whether rows have no incomplete tile), and the sizes of the grid
        and the threadgroups.
    """
    rows, N = x.shape
    count = -(-rows // max(1, min(max_rows, rows // min_teams)))
    wide = N > _NARROW
    if wide:
        chunks = 2
        while chunks < max_chunks and 4 * chunks * _THREADS < N:
            chunks *= 2
        threads, groups = min(_THREADS, 32 * -(-N // (128 * chunks))), count
        if chunks == max_chunks and N % (4 * chunks * threads):  # checks for the end of a row need registers, too
            threads = min(threads, _SAFE_THREADS)
    else:
        chunks, simdgroups = 1 if N <= 128 else 2 if N <= 256 else 4, min(4, count)
        threads, groups = 32 * simdgroups, -(-count // simdgroups)
        count = groups * simdgroups
    sizes = {"grid": (groups * threads, 1, 1), "threadgroup": (threads, 1, 1)}
    team = threads if wide else 32
    return count, {"CHUNKS": chunks, "WIDE": wide, "EXACT": N % (4 * chunks * team) == 0}, sizes


def _forward_teams(x: mx.array) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the template arguments and sizes for `rms_norm.metal` and `add_rms_norm.metal`."""
    _, template, sizes = _teams(x, _FORWARD_CHUNKS, _FORWARD_ROWS, _FORWARD_TEAMS)
    long = template["WIDE"] and x.shape[1] > 4 * template["CHUNKS"] * sizes["threadgroup"][0]
    return {**template, **({"CHUNKS": 1, "EXACT": False} if long else {}), "LONG": long}, sizes


@cache
def _rms_norm_metal(eps: float) -> Callable[..., mx.array]:
    @mx.custom_function
    def norm(x: mx.array, weight: mx.array) -> mx.array:
        x2, dtype = x.reshape(-1, x.shape[-1]), mx.result_type(x, weight)
        template, sizes = _forward_teams(x2)
        inputs = [x2, weight, scalar(eps, mx.float32)]
        (y,) = _NORM(inputs, {"T": dtype, **template}, **sizes, outputs=[(x2.shape, dtype)])
        return y.reshape(x.shape)

    @norm.vjp
    def gradient(primals: list[mx.array], dy: mx.array, _output: mx.array) -> tuple[mx.array, mx.array]:
        x, weight = primals
        return _gradient(x, weight, dy, None, eps)

    return norm


@cache
def _add_rms_norm_metal(eps: float) -> Callable[..., tuple[mx.array, mx.array]]:
    @mx.custom_function
    def add_norm(x: mx.array, residual: mx.array, weight: mx.array) -> tuple[mx.array, mx.array]:
        x2, dtype = x.reshape(-1, x.shape[-1]), mx.result_type(x, residual)
        out_dtype = mx.result_type(dtype, weight.dtype)
        template, sizes = _forward_teams(x2)
        inputs = [x2, residual.reshape(x2.shape), weight, scalar(eps, mx.float32)]
        template = {"H": dtype, "T": out_dtype, **template}
        h, y = _ADD_NORM(inputs, template, **sizes, outputs=[(x2.shape, dtype), (x2.shape, out_dtype)])
        return h.reshape(x.shape), y.reshape(x.shape)

    @add_norm.vjp
    def gradient(
        primals: list[mx.array], cotangents: list[mx.array], outputs: list[mx.array]
    ) -> tuple[mx.array, mx.array, mx.array]:
        x, residual, weight = primals
        dh, dy = cotangents
        dx, dw = _gradient(outputs[0], weight, dy, dh, eps)
        return dx.astype(x.dtype), dx.astype(residual.dtype), dw

    return add_norm


def _gradient(
    x: mx.array, weight: mx.array, dy: mx.array, dh: mx.array | None, eps: float
) -> tuple[mx.array, mx.array]:
    """Return the gradients of x and weight; dh, unless None, is added to the first."""
    x2 = x.reshape(-1, x.shape[-1])
    teams, template, sizes = _teams(x2, _GRADIENT_CHUNKS, _GRADIENT_ROWS, _GRADIENT_TEAMS)
    dy = dy.reshape(x2.shape)
    inputs = [x2, weight, dy, dy if dh is None else dh.reshape(x2.shape), scalar(eps, mx.float32)]
    template = {"T": x.dtype, "STREAM": dh is not None, "ROWS": _GRADIENT_ROWS, **template}
    outputs = [(x2.shape, x.dtype), ((teams, x2.shape[1]), mx.float32)]
    dx, dw = _GRADIENT(inputs, template, **sizes, outputs=outputs)
    return dx.reshape(x.shape), dw.sum(axis=0).astype(weight.dtype)


_ROWS = (8, 512, 4096)  # rows of the cases, rounded up: decoding, prefill, training (which has no limit)


def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Compute RMSNorm.

    Args:
        x: `[..., N]`, float32, float16 or bfloat16.
        weight: `[N]`.
        eps: Added to the mean square.

    Returns:
        `[..., N]` in the dtype that x and weight promote to.
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
    """
    case = _case(ADD_NORM, x, weight, residual)
    if not x.size:  # a kernel needs a thread
        return _add_rms_norm_mlx(x, residual, weight, eps)
    return ADD_NORM.implementation(case)(x, residual, weight, eps)


def _add_rms_norm_mlx(x: mx.array, residual: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    h = x + residual
    return h, mx.fast.rms_norm(h, weight, eps)


def _case(operation: Operation, x: mx.array, weight: mx.array, residual: mx.array | None = None) -> Case:
    N, dtype, size = x.shape[-1], x.dtype, x.size
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
