"""Causal grouped-query attention. `attention_dispatch` has its implementations and when each is used."""

from __future__ import annotations

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.kernels.attention_dispatch import DECODE, MAX_DECODE_QUERIES, PREFILL, QUANTIZED, TRAINING, attention_case
from mlxlm.kernels.dispatch import DTYPE_NAMES, Operation
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
        queries: `[B, H, T, D]`, float32, float16 or bfloat16. The T queries are the last T of the S positions.
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
        `[B, H, T, D]`; 0 for queries that see no key (T > S).

    Raises:
        ValueError: Shapes, dtypes or options are invalid.
    """
    shape = keys.shape
    if shape != values.shape or not queries.dtype == keys.dtype == values.dtype:
        arrays = ", ".join(f"{x.shape} {x.dtype}" for x in (queries, keys, values))
        raise ValueError(f"keys and values must have the same shape, and all arrays the same dtype: {arrays}")
    options = {"window": window, "softcap": softcap, "slopes": slopes, "first": first, "segment_ids": segment_ids}
    decoding = queries.shape[2] <= MAX_DECODE_QUERIES
    if isinstance(keys, QuantizedKV) or isinstance(values, QuantizedKV):
        form = _quantization(keys, values)
        # On the CPU, a quantized product takes as long per row as dequantizing the whole key head.
        shared = ON_CPU and queries.shape[1] * queries.shape[2] > keys.shape[1]
        if decoding and not training and not shared and segment_ids is None:
            return _run(QUANTIZED, queries, *_arrays(keys, values), shape, scale, options, form)
        keys, values = (x.dequantized() if isinstance(x, QuantizedKV) else x for x in (keys, values))
    operation = TRAINING if training else DECODE if decoding else PREFILL
    return _run(operation, queries, keys, values, shape, scale, options, {})


def _arrays(*sides: mx.array | QuantizedKV) -> list[mx.array | tuple[mx.array, ...]]:
    return [x.arrays if isinstance(x, QuantizedKV) else x for x in sides]


def _quantization(keys: mx.array | QuantizedKV, values: mx.array | QuantizedKV) -> dict[str, int]:
    """Group size and bits (0: not quantized). Raises ValueError for invalid or mixed quantizations."""
    sides = [x for x in (keys, values) if isinstance(x, QuantizedKV)]
    for x in sides:
        packed = (*x.shape[:-1], x.shape[-1] * x.bits // 32)
        valid = x.packed.shape == packed and x.packed.dtype == mx.uint32
        if not valid or x.biases.shape != x.scales.shape or x.group_size != sides[0].group_size:
            arrays = ", ".join(f"{a.shape} {a.dtype}" for a in x.arrays)
            form = f"{x.bits} bits in groups of {sides[0].group_size}"
            raise ValueError(f"keys or values are not the result of mx.quantize ({form}): {arrays}")
    bits = (x.bits if isinstance(x, QuantizedKV) else 0 for x in (keys, values))
    return {"group_size": sides[0].group_size, **dict(zip(("key_bits", "value_bits"), bits, strict=True))}


def _run(operation: Operation, queries, keys, values, key_shape, scale, options, form: dict[str, int]):
    B, H, T, D = queries.shape if queries.ndim == 4 else (0, 0, 0, 0)
    if len(key_shape) != 4 or key_shape[0] != B or key_shape[3] != D or not key_shape[1] or H % key_shape[1]:
        expected = "expected [B, H, T, D] and [B, H_kv, S, D], H a multiple of H_kv"
        raise ValueError(f"queries {queries.shape} don't fit keys {key_shape}: {expected}")
    K, S = key_shape[1], key_shape[2]
    if queries.dtype not in DTYPE_NAMES:
        raise ValueError(f"attention supports float32, float16 and bfloat16, not {queries.dtype}")
    window, softcap, slopes, first, segment_ids = options.values()
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, it must be at least 1")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}, it must be positive")
    if slopes is not None:
        if slopes.shape != (H,):
            raise ValueError(f"slopes have shape {slopes.shape}, expected {(H,)}")
        slopes = slopes.astype(mx.float32)
    if first is not None and (first.shape != (B,) or first.dtype != mx.int32):
        raise ValueError(f"first is {first.dtype} {first.shape}, expected int32 {(B,)}")
    if segment_ids is not None and (segment_ids.shape != (B, T) or T != S or segment_ids.dtype != mx.int32):
        expected = f"int32 {(B, S)} and as many queries"
        raise ValueError(f"segment_ids are {segment_ids.dtype} {segment_ids.shape}, expected {expected}")
    if T > S or queries.size == 0:  # the first T - S queries see no key
        unattended = mx.zeros_like(queries[:, :, : T - S] if S and queries.size else queries)
        if unattended.shape == queries.shape:
            return unattended
        out = _run(operation, queries[:, :, T - S :], keys, values, key_shape, scale, options, form)
        return mx.concatenate([unattended, out], axis=2)
    case = attention_case(operation, DTYPE_NAMES[queries.dtype], D, H, K, T, S, *options.values(), **form)
    implementation = operation.implementation(case)
    # Implementations that don't support these two don't have the arguments.
    batched = {name: options[name] for name in ("first", "segment_ids") if options[name] is not None}
    return implementation(
        queries, keys, values, float(scale), window=window, softcap=softcap, slopes=slopes, **batched, **form
    )
