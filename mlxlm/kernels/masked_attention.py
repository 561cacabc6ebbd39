"""Attention of one query per row over a buffer of fixed length, with a mask for the part in use.

With lengths that change every 256 tokens instead of every token, a decoding step can be compiled. On a CPU, the
masked keys don't change the result: their weights are zeros, and adding zeros at the end of a sum is exact.
"""

from __future__ import annotations

from typing import Any

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.kernels.attention_dispatch import DECODE, LENGTHS, QUANTIZED, attention_case
from mlxlm.kernels.dispatch import DTYPE_NAMES, choose_path
from mlxlm.kernels.exp import exp_nonpositive
from mlxlm.kernels.mlx_attention import MANY_SCORES
from mlxlm.kernels.quantized_kv import QuantizedKV


def prefers_masked_attention(
    dtype: mx.Dtype, heads: tuple[int, int, int], features: tuple[str, ...], **quantization: int
) -> bool:
    """Whether `masked_attention` computes what `attention` would: not where a Metal kernel without a mask is preferred.

    Args:
        dtype: Of the queries.
        heads: Head dim, number of query heads, number of key heads.
        features: As in `attention_case`.
        quantization: group_size, key_bits and value_bits, if keys or values are quantized.
    """
    if dtype not in DTYPE_NAMES:
        return False
    if ON_CPU:
        return True
    operation, (D, H, K) = QUANTIZED if quantization else DECODE, heads
    lengths = [1 << i for i in range(LENGTHS[0].bit_length() - 1, LENGTHS[1].bit_length())]
    cases = (attention_case(operation, DTYPE_NAMES[dtype], D, H, K, 1, S, features, **quantization) for S in lengths)
    return all(choose_path(operation, case).path == "mlx" for case in cases)


def masked_attention(
    queries: mx.array,
    keys: mx.array | QuantizedKV,
    values: mx.array | QuantizedKV,
    scale: float,
    mask: mx.array,
    *,
    softcap: float | None = None,
    bias: mx.array | None = None,
) -> mx.array:
    """Compute softmax(queries · keysᵀ · scale) · values over the keys of the mask.

    Args:
        queries: `[B, H, 1, D]`.
        keys: `[B, H_kv, S, D]` in the same dtype, or `QuantizedKV`.
        values: As the keys.
        scale: Multiplies the scores.
        mask: bool `[B, 1, 1, S]`: which keys each row sees, at least one.
        softcap: Scores become softcap · tanh(score / softcap).
        bias: `[H, 1, S]`, float32, is added to the scores (ALiBi).

    Returns:
        `[B, H, 1, D]`.
    """
    B, H, _, D = queries.shape
    K, S = keys.shape[1:3]
    if ON_CPU and H > K:  # as in `attention`
        keys, values = (x.dequantized() if isinstance(x, QuantizedKV) else x for x in (keys, values))
    quantized = isinstance(keys, QuantizedKV) or isinstance(values, QuantizedKV)
    many = ON_CPU and B * H * S >= MANY_SCORES
    if not quantized and not many and softcap is None and bias is None:
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
    shape: tuple[int, ...] = B, K, H // K, D
    if isinstance(keys, mx.array) and isinstance(values, mx.array):
        # One product per query head, whose sums don't depend on S.
        shape, keys, values = (B, K, H // K, 1, D), keys[:, :, None], values[:, :, None]
    scores = _product((queries * scale).reshape(shape), keys, transpose=True)
    scores = scores.astype(mx.float32).reshape(B, H, 1, S)
    if softcap is not None:
        scores = softcap * mx.tanh(scores / softcap)
    scores = mx.where(mask, scores if bias is None else scores + bias, -mx.inf)
    if many:
        e = exp_nonpositive(scores - mx.max(scores, axis=-1, keepdims=True))
        probs = mx.where(mask, e, 0)  # its exp(-inf) is 1.6e-38
        total = mx.sum(probs, axis=-1, keepdims=True)
    else:
        probs, total = mx.softmax(scores, axis=-1), None
    out = _product(probs.astype(queries.dtype).reshape(*shape[:-1], S), values, transpose=False).reshape(B, H, 1, D)
    return out if total is None else (out / total).astype(queries.dtype)


def _product(rows: mx.array, side: Any, transpose: bool) -> mx.array:
    if not isinstance(side, QuantizedKV):
        return rows @ (side.swapaxes(-1, -2) if transpose else side)
    return mx.quantized_matmul(rows, *side.arrays, transpose=transpose, group_size=side.group_size, bits=side.bits)
