"""Causal grouped-query attention."""

from __future__ import annotations

from mlxlm._mlx import ON_CPU, mx
from mlxlm.kernels.exp import exp_nonpositive

_MIN_ROWS = 64  # least query rows per block on the CPU: below that the products are too small


def attention(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """softmax(queries · keysᵀ · scale) · values, row t of T seeing the keys up to S - T + t.

    queries `[B, H, T, D]`, keys and values `[B, H_kv, S, D]` with H a multiple of H_kv and S >= T: the
    last T positions of the keys are those of the queries. Returns `[B, H, T, D]`.
    """
    if ON_CPU and queries.dtype == mx.float32 and queries.shape[2] > 1:
        return _attention_cpu(queries, keys, values, scale)
    mask = "causal" if queries.shape[2] > 1 else None
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)


def _attention_cpu(queries, keys, values, scale):
    """Blocks of query rows, each against the keys it can see: half the work of the whole square."""
    B, H, T, D = queries.shape
    kv_heads, S = keys.shape[1], keys.shape[2]
    groups = H // kv_heads
    queries = (queries * scale).reshape(B, kv_heads, groups, T, D)
    step = max(_MIN_ROWS, -(-T // 4))
    out = []
    for start in range(0, T, step):
        stop = min(start + step, T)
        seen = S - T + stop
        # The heads of a group are stacked as rows, so that one product serves them all.
        rows = queries[:, :, :, start:stop].reshape(B, kv_heads, groups * (stop - start), D)
        scores = rows @ keys[:, :, :seen].swapaxes(-1, -2)
        mask = mx.arange(S - T + start, seen)[:, None] >= mx.arange(seen)[None]
        probs = _masked_softmax(scores, mx.tile(mx.where(mask, 0.0, -mx.inf), (groups, 1)))
        block = probs @ values[:, :, :seen]
        out.append(block.reshape(B, kv_heads, groups, stop - start, D))
    return mx.concatenate(out, axis=3).reshape(B, H, T, D)


@mx.custom_function
def _masked_softmax(scores: mx.array, mask: mx.array) -> mx.array:
    """softmax(scores + mask) over the last axis; the mask takes no gradient."""
    shifted = scores + mask
    e = exp_nonpositive(shifted - mx.max(shifted, axis=-1, keepdims=True))
    return e / mx.sum(e, axis=-1, keepdims=True)


@_masked_softmax.vjp
def _masked_softmax_vjp(primals, cotangent, probs):
    return _softmax_backward(cotangent, probs), mx.zeros_like(primals[1])


@mx.compile
def _softmax_backward(cotangent, probs):
    weighted = cotangent * probs
    return weighted - probs * mx.sum(weighted, axis=-1, keepdims=True)
