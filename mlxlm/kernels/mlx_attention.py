"""Attention in MLX's own operations: its fused kernels on a GPU, a graph in blocks of rows on the CPU."""

from __future__ import annotations

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.kernels.eval_points import eval_point
from mlxlm.kernels.exp import exp_nonpositive
from mlxlm.kernels.mask import causal_mask, relative_positions
from mlxlm.kernels.sums import row_sums

_MANY_SCORES = 1 << 14  # of a decoded token: from here on `exp_nonpositive` is worth a larger graph
MIN_ROWS = 64  # least query rows per block on the CPU: below that the products are too small


def mlx_attention(queries, keys, values, scale, *, window=None, first=None, segment_ids=None):
    """`mlxlm.kernels.attention` without soft cap and ALiBi, for S >= T. A gradient keeps all probabilities."""
    T, S = queries.shape[2], keys.shape[2]
    on_cpu = ON_CPU and queries.dtype == mx.float32
    if on_cpu and T > 1:
        return _attention_cpu(queries, keys, values, scale, window, first, segment_ids)
    mask = "causal" if T > 1 else None
    if window is not None and (unseen := max(0, S - T - window + 1)):
        keys, values, S = keys[:, :, unseen:], values[:, :, unseen:], S - unseen
        first = None if first is None else mx.maximum(first - unseen, 0)
    if on_cpu and queries.size // queries.shape[3] * S >= _MANY_SCORES:
        return _decode_cpu(queries, keys, values, scale, first)
    if first is not None or segment_ids is not None or (window is not None and T > 1 and window < S):
        mask = causal_mask(
            relative_positions(T, S), window, first, None if segment_ids is None else (segment_ids, segment_ids)
        )
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def _decode_cpu(queries, keys, values, scale, first):
    """One query row: MLX's own takes its time for `exp`, a scalar 12 ns each."""
    B, H, _, D = queries.shape
    rows = (queries * scale).reshape(B, keys.shape[1], -1, D)  # the heads of a group stacked
    scores = rows @ keys.swapaxes(-1, -2)
    if first is not None:
        scores = mx.where(causal_mask(relative_positions(1, keys.shape[2]), None, first), scores, -mx.inf)
    e = exp_nonpositive(scores - mx.max(scores, axis=-1, keepdims=True))
    return ((e @ values) / mx.sum(e, axis=-1, keepdims=True)).reshape(B, H, 1, D)


def _attention_cpu(queries, keys, values, scale, window, first, segment_ids):
    """Blocks of query rows, each against the keys it can see: half the work of the whole square."""
    B, H, T, D = queries.shape
    kv_heads, S = keys.shape[1], keys.shape[2]
    groups = H // kv_heads
    queries = (queries * scale).reshape(B, kv_heads, groups, T, D)
    # As they come from a projection, [B, S, H, D] in memory, each product would copy them.
    keys, values = mx.contiguous(keys), mx.contiguous(values)
    step = max(MIN_ROWS, -(-T // 4))
    out = []
    for start in range(0, T, step):
        stop = min(start + step, T)
        seen = S - T + stop
        unseen = 0 if window is None else max(0, S - T + start - window + 1)
        # The heads of a group are stacked as rows, so that one product serves them all.
        rows = queries[:, :, :, start:stop].reshape(B, kv_heads, groups * (stop - start), D)
        here = None if first is None else first - unseen
        of = None if segment_ids is None else (segment_ids[:, start:stop], segment_ids[:, unseen:seen])
        mask = mx.where(causal_mask(relative_positions(stop - start, seen - unseen), window, here, of), 0.0, -mx.inf)
        block, *_ = _attend(rows, keys[:, :, unseen:seen], values[:, :, unseen:seen], mx.tile(mask, (groups, 1)))
        out.append(block.reshape(B, kv_heads, groups, stop - start, D))
    return mx.concatenate(out, axis=3).reshape(B, H, T, D)


@mx.custom_function
def _attend(rows: mx.array, keys: mx.array, values: mx.array, mask: mx.array) -> tuple[mx.array, mx.array, mx.array]:
    """softmax(rows · keysᵀ + mask) · values and, for the gradient, e and n: the softmax is e · n.

    The scores are gone through as few times as can be, since nothing is left of them in a core's cache: what divides
    a row is applied to its output instead.
    """
    shifted = rows @ keys.swapaxes(-1, -2) + mask
    e = exp_nonpositive(shifted - mx.max(shifted, axis=-1, keepdims=True))
    n = 1 / row_sums(e)
    return eval_point(e @ values) * n, e, n


@_attend.vjp
def _attend_vjp(primals, cotangents, outputs):
    rows, keys, values, mask = primals
    out, e, n = outputs
    cotangent = cotangents[0] * n
    # The softmax p has the gradient p · (dp - Σ dp · p), and the sum is the cotangent times the output
    # (Dao et al. 2022, "FlashAttention", B.4).
    slopes = _slopes(e, cotangent @ values.swapaxes(-1, -2), row_sums(cotangent * out))
    return (
        eval_point(slopes @ keys),
        slopes.swapaxes(-1, -2) @ rows,
        e.swapaxes(-1, -2) @ cotangent,
        mx.zeros_like(mask),
    )


@mx.compile
def _slopes(e, gradient, mean):
    return e * (gradient - mean)


def mlx_quantized_attention(
    queries,
    keys,
    values,
    scale,
    *,
    group_size,
    key_bits,
    value_bits,
    window=None,
    softcap=None,
    slopes=None,
    first=None,
):
    """Two products around a softmax, which never dequantize the cache as a whole.

    keys and values are the triples of `mx.quantize`, or plain arrays where their bits are 0.
    """
    B, H, T, D = queries.shape

    def product(rows, side, bits, transpose):
        if bits:
            return mx.quantized_matmul(rows, *side, transpose=transpose, group_size=group_size, bits=bits)
        return rows @ (side.swapaxes(-1, -2) if transpose else side)

    kv_heads, S = (keys[0] if key_bits else keys).shape[1:3]
    rows = (queries * scale).reshape(B, kv_heads, -1, D)  # the heads of a group stacked
    scores = product(rows, keys, key_bits, True).astype(mx.float32).reshape(B, H, T, S)
    if softcap is not None:
        scores = softcap * mx.tanh(scores / softcap)
    apart = relative_positions(T, S)
    if slopes is not None:
        scores = scores + slopes[:, None, None] * apart
    probs = mx.softmax(mx.where(causal_mask(apart, window, first), scores, -mx.inf), axis=-1).astype(queries.dtype)
    return product(probs.reshape(B, kv_heads, -1, S), values, value_bits, False).reshape(B, H, T, D)
