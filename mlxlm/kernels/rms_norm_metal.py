"""RMSNorm with the Metal kernels of `metal_kernels/`, and its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from mlxlm.backend.mlx import mx
from mlxlm.kernels.metal import FLOATS, MetalKernel

_NORM = MetalKernel("rms_norm", inputs=("x", "weight", "eps"), outputs=("y",))
_ADD_NORM = MetalKernel("add_rms_norm", inputs=("x", "residual", "weight", "eps"), outputs=("h", "y"))
_GRADIENT = MetalKernel("rms_norm_grad", inputs=("x", "weight", "dy", "dh", "eps"), outputs=("dx", "dw"))

# A forward thread keeps the values and weights of its runs in registers, a gradient thread also gradients and column
# sums. 64 floats in each of 512 threads are 128 KB of the 208 KB of registers of a GPU core. Rows of up to 16384
# (forward) and 8192 values (gradient) are read once, longer ones twice.
_THREADS = 512
_FORWARD_CHUNKS, _GRADIENT_CHUNKS = 8, 4
_NARROW = 512  # up to this many values, one SIMD group processes a row; a threadgroup has four SIMD groups
# A team processes many rows, so that reading the weight (forward) and writing its part of the weight's gradient cost
# little in comparison. But first there must be enough teams to fill the GPU.
_FORWARD_ROWS, _FORWARD_TEAMS = 16, 128
_GRADIENT_ROWS, _GRADIENT_TEAMS = 32, 128


def rms_norm_metal(x: mx.array, weight: mx.array, eps: float) -> mx.array:
    """Compute `rms_norm` with Metal kernels that read each row once, also in the gradient.

    Raises:
        ValueError: Shapes or dtypes (float32, float16, bfloat16) are invalid.
    """
    _check(x, weight)
    return _rms_norm_metal(eps)(x, weight)


def add_rms_norm_metal(x: mx.array, residual: mx.array, weight: mx.array, eps: float) -> tuple[mx.array, mx.array]:
    """Compute `add_rms_norm` with Metal kernels, in one pass over the rows.

    The norm is that of h after rounding to its dtype. The backward pass also adds the gradient of h from its other
    users in the same pass.

    Raises:
        ValueError: Shapes or dtypes (float32, float16, bfloat16) are invalid.
    """
    _check(x, weight)
    if residual.shape != x.shape or residual.dtype not in FLOATS:
        raise ValueError(f"residual is {_describe(residual)}, but x is {_describe(x)}")
    return _add_rms_norm_metal(eps)(x, residual, weight)


def _check(x: mx.array, weight: mx.array) -> None:
    if x.ndim == 0 or weight.ndim != 1 or x.shape[-1] != weight.size:
        raise ValueError(f"weight is {_describe(weight)}, but x is {_describe(x)}")
    if x.dtype not in FLOATS or weight.dtype not in FLOATS:
        raise ValueError(f"x and weight are {x.dtype} and {weight.dtype}, not float32, float16 or bfloat16")


def _describe(x: mx.array) -> str:
    return f"{list(x.shape)} of {x.dtype}"


@dataclass(frozen=True)
class _Teams:
    """How threads share the rows (see `rms_norm.metal`).

    Args:
        wide: Whether a team is a threadgroup, otherwise a SIMD group.
        chunks: Runs of four values per thread.
        threads: Threads per threadgroup.
        groups: Number of threadgroups.
    """

    wide: bool
    chunks: int
    threads: int
    groups: int

    @property
    def count(self) -> int:
        return self.groups if self.wide else self.groups * self.threads // 32

    @property
    def template(self) -> dict[str, int | bool]:
        return {"CHUNKS": self.chunks, "WIDE": self.wide}

    @property
    def size(self) -> dict[str, tuple[int, int, int]]:
        return {"grid": (self.groups * self.threads, 1, 1), "threadgroup": (self.threads, 1, 1)}


def _teams(rows: int, N: int, max_chunks: int, max_rows: int, min_teams: int) -> _Teams:
    """Choose teams for rows of N values: up to `max_rows` rows each, and `min_teams` teams if there are enough rows."""
    count = -(-rows // max(1, min(max_rows, rows // min_teams)))
    if N <= _NARROW:
        chunks = 1 if N <= 128 else 2 if N <= 256 else 4
        simdgroups = min(4, count)
        return _Teams(False, chunks, 32 * simdgroups, -(-count // simdgroups))
    chunks = 2
    while chunks < max_chunks and 4 * chunks * _THREADS < N:
        chunks *= 2
    threads = min(_THREADS, 32 * -(-N // (128 * chunks)))
    return _Teams(True, chunks, threads, count)


@cache
def _rms_norm_metal(eps: float):
    @mx.custom_function
    def norm(x, weight):
        dtype = mx.result_type(x, weight)
        if x.size == 0:
            return mx.zeros(x.shape, dtype)
        x2 = x.reshape(-1, x.shape[-1])
        teams = _teams(*x2.shape, _FORWARD_CHUNKS, _FORWARD_ROWS, _FORWARD_TEAMS)
        (y,) = _NORM(
            [x2, weight, mx.array(eps, mx.float32)],
            {"T": dtype, **teams.template},
            **teams.size,
            outputs=[(x2.shape, dtype)],
        )
        return y.reshape(x.shape)

    @norm.vjp
    def gradient(primals, dy, _output):
        return _gradient(*primals, dy, None, eps)

    return norm


@cache
def _add_rms_norm_metal(eps: float):
    @mx.custom_function
    def add_norm(x, residual, weight):
        dtype = mx.result_type(x, residual)
        out_dtype = mx.result_type(x, residual, weight)
        if x.size == 0:
            return mx.zeros(x.shape, dtype), mx.zeros(x.shape, out_dtype)
        x2 = x.reshape(-1, x.shape[-1])
        teams = _teams(*x2.shape, _FORWARD_CHUNKS, _FORWARD_ROWS, _FORWARD_TEAMS)
        h, y = _ADD_NORM(
            [x2, residual.reshape(x2.shape), weight, mx.array(eps, mx.float32)],
            {"H": dtype, "T": out_dtype, **teams.template},
            **teams.size,
            outputs=[(x2.shape, dtype), (x2.shape, out_dtype)],
        )
        return h.reshape(x.shape), y.reshape(x.shape)

    @add_norm.vjp
    def gradient(primals, cotangents, outputs):
        x, residual, weight = primals
        dh, dy = cotangents
        dx, dw = _gradient(outputs[0], weight, dy, dh, eps)
        return dx.astype(x.dtype), dx.astype(residual.dtype), dw

    return add_norm


def _gradient(x, weight, dy, dh, eps):
    """Return the gradients of x and weight; dh, unless None, is added to the first."""
    if x.size == 0:
        return mx.zeros_like(x), mx.zeros_like(weight)
    x2 = x.reshape(-1, x.shape[-1])
    teams = _teams(*x2.shape, _GRADIENT_CHUNKS, _GRADIENT_ROWS, _GRADIENT_TEAMS)
    dy = dy.reshape(x2.shape)
    stream = dh is not None
    dx, dw = _GRADIENT(
        [x2, weight, dy, dh.reshape(x2.shape) if stream else dy, mx.array(eps, mx.float32)],
        {"T": x.dtype, "STREAM": stream, "ROWS": _GRADIENT_ROWS, **teams.template},
        **teams.size,
        outputs=[(x2.shape, x.dtype), ((teams.count, x2.shape[1]), mx.float32)],
    )
    return dx.reshape(x.shape), dw.sum(axis=0).astype(weight.dtype)
