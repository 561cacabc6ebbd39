"""Causal grouped-query attention: the operations, their implementations, and which one "auto" prefers."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.kernels import decode_attention, flash_attention
from mlxlm.kernels.blockwise_attention import blockwise_attention
from mlxlm.kernels.dispatch import DTYPE_NAMES, Case, Operation, metal_available
from mlxlm.kernels.mlx_attention import mlx_attention, mlx_quantized_attention
from mlxlm.kernels.quantized_kv import QuantizedKV, quantization

MAX_DECODE_QUERIES = decode_attention.MAX_QUERIES  # up to this many queries count as decoding, as in MLX
LINEAR_MEMORY_FROM = 1024  # from this length on, the T² probabilities must not be in memory
LENGTHS = (256, 4096)  # lengths are clipped to this range

# Head dims that MLX 0.32 fuses on Metal: scaled_dot_product_attention.cpp.
_FUSED_DECODE_DIMS = (64, 96, 128, 256)
_FUSED_DECODE_ROWS = 32  # maximum of queries · heads per key head
_FUSED_PREFILL_DIMS = (64, 72, 80, 96, 128)


def attention(
    queries: mx.array,
    keys: mx.array | QuantizedKV,
    values: mx.array | QuantizedKV,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    slopes: mx.array | None = None,
    sinks: mx.array | None = None,
    first: mx.array | None = None,
    segment_ids: mx.array | None = None,
    training: bool = False,
) -> mx.array:
    """Compute softmax(queries · keysᵀ · scale) · values with a causal mask: query t sees the keys up to S - T + t.

    Args:
        queries: `[B, H, T, D]`, float32, float16 or bfloat16. The T queries are the last T of the S positions, T <= S.
        keys: `[B, H_kv, S, D]` in the same dtype, H a multiple of H_kv; or `QuantizedKV`, which has no gradient.
        values: As the keys, perhaps with another head dim. If both are quantized, with the same group size.
        scale: Multiplies the scores, usually 1 / sqrt(D).
        window: Sliding window: a query sees only its own position and the window - 1 before it.
        softcap: Soft cap c: scores become c·tanh(score / c) (Gemma Team 2024, "Gemma 2").
        slopes: `[H]`, ALiBi (Press et al. 2021): adds slope · (key position - query position) to the scores. Has no
            gradient.
        sinks: `[H]`, attention sinks: exp(sink) is added to the sum of exp(scores) that divides the weights of a query.
        first: int32 `[B]`, left padding: the index of the first key of each batch entry; queries see no key before
            it. Queries before it return finite values without meaning.
        segment_ids: int32 `[B, S]`, non-decreasing: the text of each key (sequence packing), or its chunk. A query
            only sees keys of its own.
        training: Whether a gradient is needed. Without it, not every implementation has one.

    Returns:
        `[B, H, T, D]`, with the head dim of the values.
    """
    (_, H, T, D), (_, K, S, _) = queries.shape, keys.shape
    given = {
        "window": window, "softcap": softcap, "slopes": slopes, "sinks": sinks, "first": first,
        "segment_ids": segment_ids,
    }  # fmt: skip
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    decoding, form, values_dim = T <= MAX_DECODE_QUERIES, quantization(keys, values), values.shape[3]
    operation = TRAINING if training else DECODE if decoding else PREFILL
    # On the CPU, a quantized product takes as long per row as dequantizing the whole key head.
    if form and decoding and not training and not (ON_CPU and H * T > K) and segment_ids is None:
        operation = QUANTIZED
        keys, values = (x.arrays if isinstance(x, QuantizedKV) else x for x in (keys, values))
    elif form:
        form = {}
        keys, values = (x.dequantized() if isinstance(x, QuantizedKV) else x for x in (keys, values))
    sizes = form if values_dim == D else {**form, "V": values_dim}
    case = attention_case(operation, DTYPE_NAMES[queries.dtype], D, H, K, T, S, tuple(options), window=window, **sizes)
    return operation.implementation(case)(queries, keys, values, float(scale), **options, **form)


def attention_case(
    operation: Operation, dtype: str, D: int, H: int, K: int, T: int, S: int, features: tuple[str, ...],
    *, window: int | None = None, **form: int,
) -> Case:  # fmt: skip
    """Return the case of a call.

    For decoding, T is exact and S is rounded up to a power of two. Otherwise T (about the same as S) is rounded down
    to a power of two, so that a case of T=1024 contains no shorter lengths. In training, a window is a size, rounded up
    to a power of two, and no part of the case if that isn't shorter than T.

    Args:
        operation: The operation.
        dtype: Name of the arrays' dtype.
        D: Head dim.
        H: Number of query heads.
        K: Number of key heads.
        T: Number of queries.
        S: Number of keys.
        features: Optional arguments in use: "window", "softcap", "slopes", "sinks", "first", "segment_ids".
        window: Sliding window. Only used for training.
        form: Of quantized keys and values: group_size, key_bits, value_bits. And V, the head dim of values if it
            isn't D.
    """
    shortest, longest = LENGTHS
    if operation is DECODE or operation is QUANTIZED:
        S = max(shortest, min(longest, 1 << (S - 1).bit_length()))
        return _case(operation.name, dtype, features, D, H, K, T, S, *form.items())
    rounded = max(shortest, min(longest, 1 << T.bit_length() - 1))
    if operation is TRAINING:
        features = tuple(name for name in features if name != "window")
        size = rounded if window is None else 1 << (window - 1).bit_length()
        if size < rounded <= T:
            form["window"] = size
    return _case(operation.name, dtype, features, D, H, K, rounded, None, *form.items())


@cache  # called per token and layer with few different arguments
def _case(
    operation: str,
    dtype: str,
    features: tuple[str, ...],
    D: int,
    H: int,
    K: int,
    T: int,
    S: int | None,
    *form: tuple[str, int],
) -> Case:
    sizes = {"D": D, "H": H, "K": K, **dict(form), "T": T, **({} if S is None else {"S": S})}
    return Case(operation, dtype, tuple(sizes), tuple(sizes.values()), features)


def _unsupported_reason(path: str, case: Case) -> str | None:
    """Why a path doesn't support a case of attention on unquantized keys and values."""
    decoding = case.operation == DECODE.name
    unsupported: tuple[str, ...] = ()
    if path == "mlx":
        # MLX has no gradient of sinks
        unsupported = ("softcap", "slopes", "sinks") if case.operation == TRAINING.name else ("softcap", "slopes")
    elif path == "metal":
        unsupported = ("first", "segment_ids") if decoding else ("softcap", "slopes", "first")
    if missing := [name for name in case.features if name in unsupported]:
        return f"it doesn't support {' and '.join(missing)}"
    if path != "metal":
        return None
    if "V" in case.names:
        return "it doesn't support values of another head dim"
    if decoding:
        return _decode_unsupported_reason(case)
    D = case.size("D")
    return None if D % 8 == 0 and D <= flash_attention.MAX_HEAD_DIM else f"it doesn't support head dim {D}"


def _decode_unsupported_reason(case: Case) -> str | None:
    """Why the Metal decode kernels, plain or quantized, don't support a case."""
    if case.size("D") not in decode_attention.HEAD_DIMS:
        return f"it doesn't support head dim {case.size('D')}"
    if case.size("T") > MAX_DECODE_QUERIES or _rows(case) > decode_attention.MAX_ROWS:
        return f"it supports {MAX_DECODE_QUERIES} queries, and {decode_attention.MAX_ROWS} queries · heads per key head"
    return None


def _quantized_unsupported_reason(path: str, case: Case) -> str | None:
    if path != "metal":
        return None
    if "first" in case.features:
        return "it doesn't support first"
    bits, group_size = case.size("key_bits"), case.size("group_size")
    if bits not in (4, 8) or bits != case.size("value_bits") or group_size not in (32, 64):
        return f"it doesn't support {bits} and {case.size('value_bits')} bits in groups of {group_size}"
    return _decode_unsupported_reason(case)


def _rows(case: Case) -> int:
    """Queries · heads per key head."""
    return case.size("T") * case.size("H") // case.size("K")


def _preferred_decode_paths(case: Case) -> tuple[tuple[str, ...], str]:
    if ON_CPU or (case.size("D") in _FUSED_DECODE_DIMS and _rows(case) <= _FUSED_DECODE_ROWS):
        return ("mlx", "metal", "blockwise"), "MLX's own"
    reason = f"MLX doesn't fuse head dim {case.size('D')} with {_rows(case)} queries per key head"
    return ("metal", "mlx", "blockwise"), reason


def _preferred_prefill_paths(case: Case) -> tuple[tuple[str, ...], str]:
    # MLX fuses nothing on the CPU (2.7 GB instead of 0.3 for 4096²), nor other head dims of values.
    needs_blocks = (ON_CPU or "V" in case.names) and case.size("T") >= LINEAR_MEMORY_FROM
    if needs_blocks or (ON_CPU and "sinks" in case.features):
        return ("blockwise", "mlx"), "memory linear in the length"
    if ON_CPU or case.size("D") in _FUSED_PREFILL_DIMS:
        return ("mlx", "metal", "blockwise"), "MLX's own"
    return ("metal", "mlx", "blockwise"), f"MLX doesn't fuse head dim {case.size('D')}"


def _preferred_training_paths(case: Case) -> tuple[tuple[str, ...], str]:
    """Prefer the Metal kernels only where `mlxlm kernels bench` measured them to be fastest: some spill registers."""
    paths: tuple[str, ...] = ("blockwise", "metal", "mlx")
    why = "memory linear in the length"
    if case.size("T") < LINEAR_MEMORY_FROM:
        paths = ("mlx", "metal", "blockwise")
        why = "short: MLX keeps the probabilities instead of computing them twice"
    elif not ON_CPU and not metal_available() and case.dtype != "float32" and "V" not in case.names:
        paths, why = ("mlx", "blockwise"), "MLX's own fused gradient on CUDA"
    if metal_available():
        why += "; `mlxlm kernels bench` finds out whether metal is faster here"
    return paths, why


def _preferred_quantized_paths(case: Case) -> tuple[tuple[str, ...], str]:
    return ("metal", "mlx"), "MLX has no attention kernel for quantized caches"


def _sample_inputs(case: Case) -> tuple[list[Any], dict[str, Any]]:
    """Random inputs with a model's strides: queries of a projection, keys and values as slices of a cache buffer."""
    H, K, D, T = (case.size(name) for name in ("H", "K", "D", "T"))
    S = case.size("S") if "S" in case.names else T
    batch = max(1, min(8, 2048 // T)) if case.operation == TRAINING.name else 1
    dtype = getattr(mx, case.dtype)
    seeds = mx.random.split(mx.random.key(0), 3)
    shapes = ((batch, T, H, D), (batch, K, S + 3, D), (batch, K, S + 3, case.size("V") if "V" in case.names else D))
    queries, keys, values = (mx.random.normal(s, key=k).astype(dtype) for s, k in zip(shapes, seeds, strict=True))
    window = case.size("window") if "window" in case.names else S // 2
    features = {"window": window, "softcap": 20.0, "slopes": -(2.0 ** -mx.arange(1, H + 1))}
    features["sinks"] = mx.random.normal((H,), key=seeds[0])
    features["first"] = mx.arange(batch, dtype=mx.int32) + S // 4
    features["segment_ids"] = mx.broadcast_to(3 * mx.arange(S, dtype=mx.int32) // S, (batch, S))  # three texts
    options = {name: value for name, value in features.items() if name in (*case.features, *case.names)}
    return [queries.swapaxes(1, 2), keys[:, :, :S], values[:, :, :S], D**-0.5], options


def _quantized_sample_inputs(case: Case) -> tuple[list[Any], dict[str, Any]]:
    (queries, keys, values, scale), options = _sample_inputs(case)
    form = {name: case.size(name) for name in ("group_size", "key_bits", "value_bits")}
    sides = [
        mx.quantize(x, group_size=form["group_size"], bits=bits) if bits else x
        for x, bits in ((keys, form["key_bits"]), (values, form["value_bits"]))
    ]
    return [queries, *sides, scale], {**form, **options}


def _check_cases(case: Case) -> tuple[Case, ...]:
    """Two key heads and a length that is ragged against every tile."""
    return (case.with_sizes(H=2 * case.size("H") // case.size("K"), K=2, T=70, window=35),)


def _decode_check_cases(case: Case) -> tuple[Case, ...]:
    """Two key heads, and keys for one threadgroup and for several, whose results another kernel combines.

    From 13,000 keys on, every head dim, number of rows and quantization has several threadgroups.
    """
    narrow = case.with_sizes(H=2 * case.size("H") // case.size("K"), K=2)
    return narrow.with_sizes(S=70), narrow.with_sizes(S=16411)


_PATHS: dict[str, Callable[..., Any]] = {
    "mlx": mlx_attention,
    "metal": flash_attention.tiled_attention,
    "blockwise": blockwise_attention,
}
_DECODE_PATHS = {**_PATHS, "metal": decode_attention.decode_attention}
_QUANTIZED_PATHS: dict[str, Callable[..., Any]] = {"mlx": mlx_quantized_attention, "metal": _DECODE_PATHS["metal"]}

DECODE = Operation(
    "decode_attention", _DECODE_PATHS, _preferred_decode_paths, _sample_inputs, _decode_check_cases, _unsupported_reason
)
PREFILL = Operation(
    "prompt_attention", _PATHS, _preferred_prefill_paths, _sample_inputs, _check_cases, _unsupported_reason
)
TRAINING = Operation(
    "training_attention",
    _PATHS,
    _preferred_training_paths,
    _sample_inputs,
    _check_cases,
    _unsupported_reason,
    (0, 1, 2),
)
QUANTIZED = Operation(
    "quantized_decode_attention", _QUANTIZED_PATHS, _preferred_quantized_paths, _quantized_sample_inputs,
    _decode_check_cases, _quantized_unsupported_reason,
)  # fmt: skip
