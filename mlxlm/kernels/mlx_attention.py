"""Attention with MLX's operations: its fused kernels on a GPU, blocks of queries on the CPU."""

from __future__ import annotations

from typing import Any

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.kernels.eval_points import eval_point
from mlxlm.kernels.exp import exp_nonpositive, row_sums
from mlxlm.kernels.mask import causal_mask, relative_positions
from mlxlm.kernels.sinks import add_sinks

MANY_SCORES = 1 << 14  # from this many scores per decoded token, `exp_nonpositive` is worth its larger graph
MIN_ROWS = 64  # minimum number of queries per block on the CPU; smaller matrix products are slow


def mlx_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    *,
    window: int | None = None,
    sinks: mx.array | None = None,
    first: mx.array | None = None,
    segment_ids: mx.array | None = None,
) -> mx.array:
    """Compute `mlxlm.kernels.attention` for S >= T without soft cap and ALiBi. Its gradient keeps all probabilities."""
    T, S = queries.shape[2], keys.shape[2]
    on_cpu = ON_CPU and queries.dtype == mx.float32
    if on_cpu and T > 1 and sinks is None:
        return _attention_cpu(queries, keys, values, scale, window, first, segment_ids)
    mask = "causal" if T > 1 else None
    if window is not None and (skip := max(0, S - T - window + 1)):
        keys, values, S = keys[:, :, skip:], values[:, :, skip:], S - skip
        segment_ids = None if segment_ids is None else segment_ids[:, skip:]
        first = None if first is None else mx.maximum(first - skip, 0)
    if on_cpu and T == 1 and segment_ids is None and queries.size // queries.shape[3] * S >= MANY_SCORES:
        return _decode_cpu(queries, keys, values, scale, sinks, first)
    if first is not None or segment_ids is not None or (window is not None and T > 1 and window < S):
        segments = None if segment_ids is None else (segment_ids[:, S - T :], segment_ids)
        mask = causal_mask(relative_positions(T, S), window, first, segments)
    sinks = None if sinks is None else sinks.astype(queries.dtype)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)


def _decode_cpu(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float, sinks: mx.array | None, first: mx.array | None
) -> mx.array:
    """Attention of one query, without MLX's `exp`, which takes 12 ns per element."""
    B, H, _, D = queries.shape
    rows = (queries * scale).reshape(B, keys.shape[1], -1, D)  # stack the heads of a group
    scores = rows @ keys.swapaxes(-1, -2)
    if first is not None:
        scores = mx.where(causal_mask(relative_positions(1, keys.shape[2]), None, first), scores, -mx.inf)
    maximum = mx.max(scores, axis=-1, keepdims=True)
    e = exp_nonpositive(scores - maximum)
    total = mx.sum(e, axis=-1, keepdims=True)
    if sinks is not None:
        total = total + mx.exp(sinks.reshape(keys.shape[1], -1, 1) - maximum)
    return ((e @ values) / total).reshape(B, H, 1, -1)


def _attention_cpu(
    queries: mx.array, keys: mx.array, values: mx.array, scale: float,
    window: int | None, first: mx.array | None, segment_ids: mx.array | None,
) -> mx.array:  # fmt: skip
    """Attention in blocks of queries with their visible keys: half the work of all T · S scores."""
    B, H, T, D = queries.shape
    kv_heads, S = keys.shape[1], keys.shape[2]
    groups = H // kv_heads
    queries = (queries * scale).reshape(B, kv_heads, groups, T, D)
    if S == T:  # a projection gives [B, S, H, D] in memory, which each product would copy; a cache has contiguous rows
        keys, values = mx.contiguous(keys), mx.contiguous(values)
    step = max(MIN_ROWS, -(-T // 4))
    out = []
    for start in range(0, T, step):
        stop = min(start + step, T)
        seen = S - T + stop
        skip = 0 if window is None else max(0, S - T + start - window + 1)
        # Stack the heads of a group as rows, for one product instead of several.
        rows = queries[:, :, :, start:stop].reshape(B, kv_heads, groups * (stop - start), D)
        padding = None if first is None else first - skip
        segments = None if segment_ids is None else (segment_ids[:, S - T + start : seen], segment_ids[:, skip:seen])
        visible = causal_mask(relative_positions(stop - start, seen - skip), window, padding, segments)
        mask = mx.tile(mx.where(visible, 0.0, -mx.inf), (groups, 1))
        block, *_ = _attend(rows, keys[:, :, skip:seen], values[:, :, skip:seen], mask)
        out.append(block.reshape(B, kv_heads, groups, stop - start, -1))
    return mx.concatenate(out, axis=3).reshape(B, H, T, -1)


@mx.custom_function
def _attend(rows: mx.array, keys: mx.array, values: mx.array, mask: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """Return softmax(rows · keysᵀ + mask) · values and, for the gradient, e and n with softmax = e · n.

    The output is divided instead of the scores: those don't fit in a core's cache, so each pass over them is slow.
    """
    shifted = rows @ keys.swapaxes(-1, -2) + mask
    e = exp_nonpositive(shifted - mx.max(shifted, axis=-1, keepdims=True))
    n = 1 / row_sums(e)
    return eval_point(e @ values) * n, e, n


@_attend.vjp
def _attend_vjp(
    primals: list[mx.array], cotangents: list[mx.array], outputs: list[mx.array]
) -> tuple[mx.array, mx.array, mx.array, mx.array]:
    rows, keys, values, mask = primals
    out, e, n = outputs
    cotangent = cotangents[0] * n
    # The gradient of the softmax p is p · (dp - Σ dp · p), and the sum is cotangent · output (Dao et al. 2022,
    # "FlashAttention", B.4).
    score_grads = _score_grads(e, cotangent @ values.swapaxes(-1, -2), row_sums(cotangent * out))
    return (
        eval_point(score_grads @ keys),
        score_grads.swapaxes(-1, -2) @ rows,
        e.swapaxes(-1, -2) @ cotangent,
        mx.zeros_like(mask),
    )


@mx.compile
def _score_grads(e: mx.array, gradient: mx.array, mean: mx.array) -> mx.array:
    return e * (gradient - mean)


def mlx_quantized_attention(
    queries: mx.array,
    keys: tuple[mx.array, ...] | mx.array,
    values: tuple[mx.array, ...] | mx.array,
    scale: float,
    *,
    group_size: int,
    key_bits: int,
    value_bits: int,
    window: int | None = None,
    softcap: float | None = None,
    slopes: mx.array | None = None,
    sinks: mx.array | None = None,
    first: mx.array | None = None,
) -> mx.array:
    """Compute attention with quantized matrix products, which don't dequantize the whole cache.

    Keys and values are the three arrays of `mx.quantize`, or one array if their bits are 0.
    """
    B, H, T, D = queries.shape

    def product(rows: mx.array, side: Any, bits: int, transpose: bool) -> mx.array:
        if bits:
            return mx.quantized_matmul(rows, *side, transpose=transpose, group_size=group_size, bits=bits)
        return rows @ (side.swapaxes(-1, -2) if transpose else side)

    key_array: mx.array = keys[0] if key_bits else keys
    kv_heads, S = key_array.shape[1:3]
    rows = (queries * scale).reshape(B, kv_heads, -1, D)  # stack the heads of a group
    scores = product(rows, keys, key_bits, True).astype(mx.float32).reshape(B, H, T, S)
    if softcap is not None:
        scores = softcap * mx.tanh(scores / softcap)
    distance = relative_positions(T, S)
    if slopes is not None:
        scores = scores + slopes[:, None, None] * distance
    scores = mx.where(causal_mask(distance, window, first), scores, -mx.inf)
    probs = mx.softmax(scores, axis=-1).astype(queries.dtype)
    out = product(probs.reshape(B, kv_heads, -1, S), values, value_bits, False).reshape(B, H, T, D)
    return out if sinks is None else add_sinks(out, mx.logsumexp(scores, axis=-1), sinks)
