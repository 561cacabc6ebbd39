"""Metal attention for training, with memory linear in the length, forward and backward.

FlashAttention-2 (Dao 2023, arXiv 2307.08691): scores are computed in tiles and never stored. The gradients recompute
them from the log-sum-exp of each row.
"""

from __future__ import annotations

from functools import lru_cache

from mlxlm.backend.mlx import mx
from mlxlm.kernels.metal import FLOATS, MetalKernel

# A lane stores its part of keys, values and both gradients: with head dim 128 in half precision, 96 of ~128 registers.
MAX_HEAD_DIM = 128

_ROWS = 32  # rows per threadgroup: four SIMD groups of eight
_STAGED_BYTES = 8192  # bytes of a staged tile: two padded tiles take about half of a threadgroup's 32 KiB

_HEADERS = ("common.h", "attention_tiles.h")
_FORWARD = MetalKernel(
    "attention_forward",
    inputs=("queries", "keys", "values", "scale", "window"),
    outputs=("output", "lse"),
    contiguous=False,
    headers=_HEADERS,
)
_GRAD_QUERY = MetalKernel(
    "attention_grad_query",
    inputs=("queries", "keys", "values", "output", "lse", "output_grad", "lse_grad", "scale", "window"),
    outputs=("query_grad", "delta"),
    contiguous=False,
    headers=_HEADERS,
)
_GRAD_KEY_VALUE = MetalKernel(
    "attention_grad_key_value",
    inputs=("queries", "keys", "values", "output_grad", "lse", "delta", "scale", "window"),
    outputs=("key_grad", "value_grad"),
    contiguous=False,
    headers=_HEADERS,
)


def tiled_attention(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, *, window: int | None = None
) -> mx.array:
    """Compute causal attention with a gradient: query t sees the keys up to S - T + t. Sums are float32.

    Args:
        queries: `[B, H, T, D]`, float32, float16 or bfloat16, with any strides. D is a multiple of 8 up to 128.
        keys: `[B, H_kv, S, D]` in the same dtype, with any strides. H is a multiple of H_kv.
        values: As the keys.
        scale: Multiplies the scores.
        window: Sliding window: a query sees only the last `window` keys, including its own.

    Returns:
        `[B, H, T, D]` in the inputs' dtype. A query that sees no key (T > S) gives 0 and has no gradient.

    Raises:
        ValueError: Shapes or dtypes are not supported.
    """
    return tiled_attention_with_lse(queries, keys, values, scale, window=window)[0]


def tiled_attention_with_lse(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, *, window: int | None = None
) -> tuple[mx.array, mx.array]:
    """Compute `tiled_attention` and the log-sum-exp of each row's scores (natural logarithm).

    Returns:
        The output `[B, H, T, D]`, and the log-sum-exp, float32 `[B, H, T]`: -inf for a query that sees no key. Both
        have a gradient.
    """
    _check(queries, keys, values, window)
    output, lse = _differentiable(float(scale), window)(queries, keys, values)
    return output, lse


def _check(queries, keys, values, window):
    shapes = f"queries {queries.shape}, keys {keys.shape}, values {values.shape}"
    if not queries.ndim == keys.ndim == values.ndim == 4:
        raise ValueError(f"attention requires arrays with four axes, not {shapes}")
    if queries.dtype not in FLOATS or not queries.dtype == keys.dtype == values.dtype:
        dtypes = ", ".join(str(x.dtype) for x in (queries, keys, values))
        raise ValueError(f"attention requires float32, float16 or bfloat16, the same for all, not {dtypes}")
    B, H, T, D = queries.shape
    kv_heads, S = keys.shape[1:3]
    if keys.shape != values.shape or keys.shape != (B, kv_heads, S, D):
        raise ValueError(f"attention requires keys and values of one shape that fits the queries, not {shapes}")
    if 0 in queries.shape or 0 in keys.shape:
        raise ValueError(f"attention doesn't support empty arrays: {shapes}")
    if H % kv_heads:
        raise ValueError(f"{H} query heads are not a multiple of {kv_heads} key heads")
    if D % 8 or D > MAX_HEAD_DIM:
        raise ValueError(f"head dim {D} is not a multiple of 8 up to {MAX_HEAD_DIM}")
    if window is not None and window < 1:
        raise ValueError(f"window {window} is less than 1")


@lru_cache
def _differentiable(scale: float, window: int | None):
    """Make the differentiable function (queries, keys, values) -> (output, log-sum-exp)."""

    @mx.custom_function
    def attend(queries, keys, values):
        output, lse = _launch(
            _FORWARD,
            queries,
            [queries, keys, values, *_scalars(keys, scale, window)],
            [(queries.shape, queries.dtype), (queries.shape[:3], mx.float32)],
        )
        return output, lse

    @attend.vjp
    def attend_vjp(primals, cotangents, outputs):
        queries, keys, values = primals
        output_grad, lse_grad = cotangents
        output, lse = outputs
        scalars = _scalars(keys, scale, window)
        query_grad, delta = _launch(
            _GRAD_QUERY,
            queries,
            [queries, keys, values, output, lse, output_grad, lse_grad, *scalars],
            [(queries.shape, queries.dtype), (lse.shape, mx.float32)],
        )
        key_grad, value_grad = _launch(
            _GRAD_KEY_VALUE,
            keys,
            [queries, keys, values, output_grad, lse, delta, *scalars],
            [(keys.shape, keys.dtype), (values.shape, values.dtype)],
        )
        return query_grad, key_grad, value_grad

    return attend


def _scalars(keys, scale, window):
    S = keys.shape[2]
    return mx.array(scale, mx.float32), mx.array(S if window is None else min(window, S), mx.int32)


def _launch(kernel, rows, inputs, outputs):
    """Launch one threadgroup per head and per tile of `rows`, the queries or the keys."""
    B, heads, length, D = rows.shape
    staged = min(32, _STAGED_BYTES // (D * rows.itemsize) // 8 * 8)
    template = {"T": rows.dtype, "D": D, "ROWS": _ROWS, "STAGED": staged}
    threads = 4 * _ROWS
    return kernel(inputs, template, (-(-length // _ROWS) * threads, heads, B), (threads, 1, 1), outputs)
