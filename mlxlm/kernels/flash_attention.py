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
_FORWARD = _kernel("attention_forward", ("queries", "keys", "values", "scale", "first_keys"), ("output", "lse"))
_GRAD_QUERY = _kernel(
    "attention_grad_query",
    ("queries", "keys", "values", "output", "lse", "output_grad", "lse_grad", "scale", "first_keys"),
    ("query_grad", "delta"),
)
_GRAD_KEY_VALUE = _kernel(
    "attention_grad_key_value",
    ("queries", "keys", "values", "output_grad", "lse", "delta", "scale", "query_ends"),
    ("key_grad", "value_grad"),
)


def tiled_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    *,
    window: int | None = None,
    segment_ids: mx.array | None = None,
) -> mx.array:
    """Compute causal attention with a gradient: query t sees the keys up to S - T + t. Sums are float32.

    The arguments are not checked: `mlxlm.kernels.attention` does that.

    Args:
        queries: `[B, H, T, D]`, float32, float16 or bfloat16, with any strides. D is a multiple of 8 up to 128.
        keys: `[B, H_kv, S, D]` in the same dtype, with any strides. H is a multiple of H_kv.
        values: As the keys.
        scale: Multiplies the scores.
        window: Sliding window: a query sees only the last `window` keys, including its own.
        segment_ids: int32 `[B, T]`, T = S, non-decreasing: a query only sees keys of its own text.

    Returns:
        `[B, H, T, D]` in the inputs' dtype. A query that sees no key (T > S) gives 0 and has no gradient.
    """
    segments = () if segment_ids is None else (segment_ids,)
    output, _ = attention_with_lse(float(scale), window)(queries, keys, values, *segments)
    return output


@cache
def attention_with_lse(scale: float, window: int | None) -> Callable[..., tuple[mx.array, mx.array]]:
    """Make the differentiable function (queries, keys, values) -> (output, log-sum-exp of each row's scores).

    A fourth argument, segment_ids, is optional and has no gradient. The log-sum-exp is natural, float32 `[B, H, T]`,
    and -inf for a query that sees no key.
    """

    @mx.custom_function
    def attend(queries: mx.array, keys: mx.array, values: mx.array, *segments: mx.array) -> tuple[mx.array, mx.array]:
        first_keys, _ = _visible(queries, keys, window, *segments)
        inputs = [queries, keys, values, mx.array(scale, mx.float32), first_keys]
        output, lse = _launch(_FORWARD, queries, inputs, [_like(queries), (queries.shape[:3], mx.float32)])
        return output, lse

    @attend.vjp
    def attend_vjp(
        primals: list[mx.array], cotangents: list[mx.array], outputs: list[mx.array]
    ) -> tuple[mx.array, ...]:
        queries, keys, values, *segments = primals
        output_grad, lse_grad = cotangents
        output, lse = outputs
        first_keys, query_ends = _visible(queries, keys, window, *segments)
        factor = mx.array(scale, mx.float32)
        inputs = [queries, keys, values, output, lse, output_grad, lse_grad, factor, first_keys]
        query_grad, delta = _launch(_GRAD_QUERY, queries, inputs, [_like(queries), _like(lse)])
        inputs = [queries, keys, values, output_grad, lse, delta, factor, query_ends]
        key_grad, value_grad = _launch(_GRAD_KEY_VALUE, keys, inputs, [_like(keys), _like(values)])
        return query_grad, key_grad, value_grad, *(mx.zeros_like(x) for x in segments)

    return attend


def _like(x: mx.array) -> Output:
    return x.shape, x.dtype


def _visible(
    queries: mx.array, keys: mx.array, window: int | None, segment_ids: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Return the first key that each query sees, int32 `[B, T]`, and the query after the last that sees each key.

    The last key that a query sees is that of its own position. The second array is `[B, S]`.
    """
    (B, _, T, _), S = queries.shape, keys.shape[2]
    first, end = mx.array(0), mx.array(T)
    if segment_ids is not None:
        index, edge = mx.arange(S), mx.ones((B, 1), mx.bool_)
        begins = segment_ids[:, 1:] != segment_ids[:, :-1]
        first = mx.cummax(mx.where(mx.concatenate([edge, begins], axis=1), index, 0), axis=1)
        end = mx.cummin(mx.where(mx.concatenate([begins, edge], axis=1), index + 1, S), axis=1, reverse=True)
    if window is not None:
        first = mx.maximum(first, mx.arange(S - T, S) - (window - 1))
        end = mx.minimum(end, mx.arange(S) + (window - S + T))
    return mx.broadcast_to(first, (B, T)), mx.broadcast_to(end, (B, S))


def _launch(kernel: MetalKernel, rows: mx.array, inputs: list[mx.array], outputs: list[Output]) -> list[mx.array]:
    """Launch one threadgroup per head and per tile of `rows`, the queries or the keys."""
    B, heads, length, D = rows.shape
    staged = min(32, _STAGED_BYTES // (D * rows.itemsize) // 8 * 8)
    template = {"T": rows.dtype, "D": D, "ROWS": _ROWS, "STAGED": staged}
    threads = 4 * _ROWS
    return kernel(inputs, template, (-(-length // _ROWS) * threads, heads, B), (threads, 1, 1), outputs)
