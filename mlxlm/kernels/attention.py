"""Causal grouped-query attention. `attention_dispatch` has its implementations and when each is used."""

from __future__ import annotations

from typing import Any

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.kernels.attention_dispatch import DECODE, MAX_DECODE_QUERIES, PREFILL, QUANTIZED, TRAINING, attention_case
from mlxlm.kernels.dispatch import DTYPE_NAMES
from mlxlm.kernels.quantized_kv import QuantizedKV


def attention(
    queries: mx.array,
    keys: mx.array | QuantizedKV,
    values: mx.array | QuantizedKV,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    slopes: mx.array | None = None,
    first: mx.array | None = None,
    segment_ids: mx.array | None = None,
    training: bool = False,
) -> mx.array:
    """Compute softmax(queries · keysᵀ · scale) · values with a causal mask: query t sees the keys up to S - T + t.

    Args:
        queries: `[B, H, T, D]`, float32, float16 or bfloat16. The T queries are the last T of the S positions, T <= S.
        keys: `[B, H_kv, S, D]` in the same dtype, H a multiple of H_kv; or `QuantizedKV`, which has no gradient.
        values: The same shape as the keys. If both are quantized, with the same group size.
        scale: Multiplies the scores, usually 1 / sqrt(D).
        window: Sliding window: a query sees only its own position and the window - 1 before it.
        softcap: Soft cap c: scores become c·tanh(score / c) (Gemma Team 2024, "Gemma 2").
        slopes: `[H]`, ALiBi (Press et al. 2021): adds slope · (key position - query position) to the scores. Has no
            gradient.
        first: int32 `[B]`, left padding: the index of the first key of each batch entry; queries see no key before
            it. Queries before it return finite values without meaning.
        segment_ids: int32 `[B, T]`, T = S, non-decreasing: the text of each position (sequence packing). A query
            only sees keys of its own text.
        training: Whether a gradient is needed. Without it, not every implementation has one.

    Returns:
        `[B, H, T, D]`.

    Raises:
        ValueError: Shapes, dtypes or options are invalid.
    """
    B, H, T, D = queries.shape
    K, S = keys.shape[1:3]
    fit = keys.shape == values.shape == (B, K, S, D) and K > 0 and H % K == 0 and 0 < T <= S
    if not fit or not queries.dtype == keys.dtype == values.dtype or queries.dtype not in DTYPE_NAMES:
        arrays = ", ".join(f"{x.shape} {x.dtype}" for x in (queries, keys, values))
        raise ValueError(f"expected [B, H, T, D] and twice [B, H_kv, S, D] of one float dtype, not {arrays}")
    for name, mask, shape in (("first", first, (B,)), ("segment_ids", segment_ids, (B, S))):
        if mask is not None and (mask.shape != shape or mask.dtype != mx.int32):
            raise ValueError(f"{name} has shape {mask.shape} and dtype {mask.dtype}, not {shape} and int32")
    if segment_ids is not None and T != S:
        raise ValueError(f"segment_ids are for as many queries as keys, not {T} and {S}")
    if slopes is not None and slopes.shape != (H,):
        raise ValueError(f"slopes have shape {slopes.shape}, not {(H,)}")
    if (window is not None and window < 1) or (softcap is not None and not softcap > 0):
        raise ValueError(f"window is {window} and softcap {softcap}, they must be positive")
    given = {"window": window, "softcap": softcap, "slopes": slopes, "first": first, "segment_ids": segment_ids}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    decoding, form = T <= MAX_DECODE_QUERIES, {}
    operation = TRAINING if training else DECODE if decoding else PREFILL
    if isinstance(keys, QuantizedKV) or isinstance(values, QuantizedKV):
        form = _quantization(keys, values)
        # On the CPU, a quantized product takes as long per row as dequantizing the whole key head.
        if decoding and not training and not (ON_CPU and H * T > K) and segment_ids is None:
            operation = QUANTIZED
            keys, values = (x.arrays if isinstance(x, QuantizedKV) else x for x in (keys, values))
        else:
            form = {}
            keys, values = (x.dequantized() if isinstance(x, QuantizedKV) else x for x in (keys, values))
    case = attention_case(operation, DTYPE_NAMES[queries.dtype], D, H, K, T, S, tuple(options), window=window, **form)
    return operation.implementation(case)(queries, keys, values, float(scale), **options, **form)


def _quantization(*sides: mx.array | QuantizedKV) -> dict[str, int]:
    """Group size and bits (0: not quantized). Raises ValueError for invalid or mixed quantizations."""
    quantized = [x for x in sides if isinstance(x, QuantizedKV)]
    group_size = quantized[0].group_size
    for x in quantized:
        packed = (*x.shape[:-1], x.shape[-1] * x.bits // 32)
        valid = x.packed.shape == packed and x.packed.dtype == mx.uint32 and x.biases.dtype == x.dtype
        if not valid or x.biases.shape != x.scales.shape or x.group_size != group_size:
            arrays = ", ".join(f"{a.shape} {a.dtype}" for a in x.arrays)
            form = f"{x.bits} bits in groups of {group_size}"
            raise ValueError(f"keys or values are not the result of mx.quantize ({form}): {arrays}")
    key_bits, value_bits = (x.bits if isinstance(x, QuantizedKV) else 0 for x in sides)
    return {"group_size": group_size, "key_bits": key_bits, "value_bits": value_bits}
