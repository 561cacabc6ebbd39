"""Metal attention for training, with memory linear in the length, forward and backward.

FlashAttention-2 (Dao 2023, arXiv 2307.08691): scores are computed in tiles and never stored. The gradients recompute
them from the log-sum-exp of each row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

from mlxlm.backend.mlx import mx
from mlxlm.kernels.metal import MetalKernel, Output

# A lane stores its part of keys, values and both gradients: with head dim 128 in half precision, 96 of ~128 registers.
MAX_HEAD_DIM = 128

_ROWS = 32  # rows per threadgroup: four SIMD groups of eight
_STAGED_BYTES = 8192  # bytes of a staged tile: two padded tiles take about half of a threadgroup's 32 KiB

_kernel = partial(MetalKernel, contiguous=False, headers=("common.h", "attention_tiles.h"))
_FORWARD = _kernel("attention_forward", ("queries", "keys", "values", "scale", "window"), ("output", "lse"))
_GRAD_QUERY = _kernel(
    "attention_grad_query",
    ("queries", "keys", "values", "output", "lse", "output_grad", "lse_grad", "scale", "window"),
    ("query_grad", "delta"),
)
_GRAD_KEY_VALUE = _kernel(
    "attention_grad_key_value",
    ("queries", "keys", "values", "output_grad", "lse", "delta", "scale", "window"),
    ("key_grad", "value_grad"),
)


def tiled_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, *, window: int | None = None
) -> mx.array:
    """Compute causal attention with a gradient: query t sees the keys up to S - T + t. Sums are float32.

    The arguments are not checked: `mlxlm.kernels.attention` does that.

    Args:
        queries: `[B, H, T, D]`, float32, float16 or bfloat16, with any strides. D is a multiple of 8 up to 128.
        keys: `[B, H_kv, S, D]` in the same dtype, with any strides. H is a multiple of H_kv.
        values: As the keys.
        scale: Multiplies the scores.
        window: Sliding window: a query sees only the last `window` keys, including its own.

    Returns:
        `[B, H, T, D]` in the inputs' dtype. A query that sees no key (T > S) gives 0 and has no gradient.
    """
    output, _ = attention_with_lse(float(scale), window)(queries, keys, values)
    return output


@cache
def attention_with_lse(scale: float, window: int | None) -> Callable[..., tuple[mx.array, mx.array]]:
    """Make the differentiable function (queries, keys, values) -> (output, log-sum-exp of each row's scores).

    The log-sum-exp is natural, float32 `[B, H, T]`, and -inf for a query that sees no key.
    """

    @mx.custom_function
    def attend(queries: mx.array, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        inputs = [queries, keys, values, *_scalars(keys, scale, window)]
        output, lse = _launch(_FORWARD, queries, inputs, [_like(queries), (queries.shape[:3], mx.float32)])
        return output, lse

    @attend.vjp
    def attend_vjp(
        primals: list[mx.array], cotangents: list[mx.array], outputs: list[mx.array]
    ) -> tuple[mx.array, mx.array, mx.array]:
        queries, keys, values = primals
        output_grad, lse_grad = cotangents
        output, lse = outputs
        scalars = _scalars(keys, scale, window)
        inputs = [queries, keys, values, output, lse, output_grad, lse_grad, *scalars]
        query_grad, delta = _launch(_GRAD_QUERY, queries, inputs, [_like(queries), _like(lse)])
        inputs = [queries, keys, values, output_grad, lse, delta, *scalars]
        key_grad, value_grad = _launch(_GRAD_KEY_VALUE, keys, inputs, [_like(keys), _like(values)])
        return query_grad, key_grad, value_grad

    return attend


def _like(x: mx.array) -> Output:
    return x.shape, x.dtype


def _scalars(keys: mx.array, scale: float, window: int | None) -> tuple[mx.array, mx.array]:
    S = keys.shape[2]
    return mx.array(scale, mx.float32), mx.array(S if window is None else min(window, S), mx.int32)


def _launch(kernel: MetalKernel, rows: mx.array, inputs: list[mx.array], outputs: list[Output]) -> list[mx.array]:
    """Launch one threadgroup per head and per tile of `rows`, the queries or the keys."""
    B, heads, length, D = rows.shape
    staged = min(32, _STAGED_BYTES // (D * rows.itemsize) // 8 * 8)
    template = {"T": rows.dtype, "D": D, "ROWS": _ROWS, "STAGED": staged}
    threads = 4 * _ROWS
    return kernel(inputs, template, (-(-length // _ROWS) * threads, heads, B), (threads, 1, 1), outputs)
