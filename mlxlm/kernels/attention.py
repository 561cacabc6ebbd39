"""Causal grouped-query attention: the contract. `attention_paths` has what computes it and when."""

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
    """softmax(queries · keysᵀ · scale) · values, row t of T seeing the keys up to S - T + t.

    queries `[B, H, T, D]`, keys and values `[B, H_kv, S, D]` of one dtype (float32, float16, bfloat16), with H
    a multiple of H_kv: the last T positions of the keys are those of the queries. Keys, values or both may be
    `QuantizedKV` instead, in groups of one size; there is no gradient then. Returns `[B, H, T, D]`; a row that sees no
    key (T > S) is 0.

    `window`: a row sees only its own position and the window - 1 before it. `softcap` c: scores become
    c·tanh(score / c) (Gemma Team 2024, "Gemma 2"). `slopes` `[H]`: a head adds slope · (key's position - own
    position) to its scores (ALiBi, Press et al. 2021); they take no gradient. `first` int32 `[B]`: nothing before
    this index belongs to the text of a batch entry, and none of its rows sees it; a row that stands before it gives
    finite values without a meaning. `segment_ids` int32 `[B, T]`, rising along a row, where T = S: the text that each
    position is of; a row sees its own text only. `training`: a gradient will be taken; without it, not every path
    has one.
    Raises ValueError for arrays that don't fit together.
    """
    shape = keys.shape
    if shape != values.shape or not queries.dtype == keys.dtype == values.dtype:
        arrays = ", ".join(f"{x.shape} {x.dtype}" for x in (queries, keys, values))
        raise ValueError(f"attention needs keys and values of one shape, and one dtype: {arrays}")
    options = {"window": window, "softcap": softcap, "slopes": slopes, "first": first, "segment_ids": segment_ids}
    decoding = queries.shape[2] <= MAX_DECODE_QUERIES
    if isinstance(keys, QuantizedKV) or isinstance(values, QuantizedKV):
        form = _form(keys, values)
        # On the CPU backend a quantized product takes as long for each row as dequantizing takes for all of a key head.
        shared = ON_CPU and queries.shape[1] * queries.shape[2] > keys.shape[1]
        if decoding and not training and not shared and segment_ids is None:
            return _run(QUANTIZED, queries, *_arrays(keys, values), shape, scale, options, form)
        keys, values = (x.dequantized() if isinstance(x, QuantizedKV) else x for x in (keys, values))
    operation = TRAINING if training else DECODE if decoding else PREFILL
    return _run(operation, queries, keys, values, shape, scale, options, {})


def _arrays(*sides: mx.array | QuantizedKV) -> list[mx.array | tuple[mx.array, ...]]:
    return [x.arrays if isinstance(x, QuantizedKV) else x for x in sides]


def _form(keys: mx.array | QuantizedKV, values: mx.array | QuantizedKV) -> dict[str, int]:
    """Group size and bits, 0 bits for a side that isn't quantized. Raises ValueError for what isn't of one form."""
    sides = [x for x in (keys, values) if isinstance(x, QuantizedKV)]
    for x in sides:
        packed = (*x.shape[:-1], x.shape[-1] * x.bits // 32)
        whole = x.packed.shape == packed and x.packed.dtype == mx.uint32
        if not whole or x.biases.shape != x.scales.shape or x.group_size != sides[0].group_size:
            arrays = ", ".join(f"{a.shape} {a.dtype}" for a in x.arrays)
            form = f"{x.bits} bits in groups of {sides[0].group_size}"
            raise ValueError(f"keys or values are not what mx.quantize gives ({form}): {arrays}")
    bits = (x.bits if isinstance(x, QuantizedKV) else 0 for x in (keys, values))
    return {"group_size": sides[0].group_size, **dict(zip(("key_bits", "value_bits"), bits, strict=True))}


def _run(operation: Operation, queries, keys, values, key_shape, scale, options, form: dict[str, int]):
    B, H, T, D = queries.shape if queries.ndim == 4 else (0, 0, 0, 0)
    if len(key_shape) != 4 or key_shape[0] != B or key_shape[3] != D or not key_shape[1] or H % key_shape[1]:
        problem = "[B, H, T, D] and [B, H_kv, S, D] are needed, H a multiple of H_kv"
        raise ValueError(f"queries {queries.shape} don't fit keys {key_shape}: {problem}")
    K, S = key_shape[1], key_shape[2]
    if queries.dtype not in DTYPE_NAMES:
        raise ValueError(f"attention takes float32, float16 or bfloat16, not {queries.dtype}")
    window, softcap, slopes, first, segment_ids = options.values()
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, but a row sees at least itself (1)")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}, it must be positive")
    if slopes is not None:
        if slopes.shape != (H,):
            raise ValueError(f"slopes are {slopes.shape}, one for each of {H} heads is needed")
        slopes = slopes.astype(mx.float32)
    if first is not None and (first.shape != (B,) or first.dtype != mx.int32):
        raise ValueError(f"first is {first.dtype} {first.shape}, int32 ({B},) is needed")
    if segment_ids is not None and (segment_ids.shape != (B, T) or T != S or segment_ids.dtype != mx.int32):
        needed = f"int32 {(B, S)} and as many queries are needed"
        raise ValueError(f"segments are {segment_ids.dtype} {segment_ids.shape}, {needed}")
    if T > S or queries.size == 0:  # rows before the first key
        blind = mx.zeros_like(queries[:, :, : T - S] if S and queries.size else queries)
        if blind.shape == queries.shape:
            return blind
        out = _run(operation, queries[:, :, T - S :], keys, values, key_shape, scale, options, form)
        return mx.concatenate([blind, out], axis=2)
    case = attention_case(operation, DTYPE_NAMES[queries.dtype], D, H, K, T, S, *options.values(), **form)
    path = operation.implementation(case)
    # Kernels that lack these two don't know their names.
    batched = {name: options[name] for name in ("first", "segment_ids") if options[name] is not None}
    return path(queries, keys, values, float(scale), window=window, softcap=softcap, slopes=slopes, **batched, **form)
