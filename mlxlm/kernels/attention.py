"""Causal grouped-query attention: the contract. `attention_paths` has what computes it and when."""

from __future__ import annotations

from mlxlm._mlx import mx
from mlxlm.kernels.attention_paths import DECODE, MOST_DECODED, PREFILL, QUANTIZED, TRAINING, attention_case
from mlxlm.kernels.dispatch import DTYPE_NAMES, Operation

Quantized = tuple[mx.array, mx.array, mx.array]  # packed values, scales, biases, as of mx.quantize


def attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    slopes: mx.array | None = None,
    training: bool = False,
) -> mx.array:
    """softmax(queries · keysᵀ · scale) · values, row t of T seeing the keys up to S - T + t.

    queries `[B, H, T, D]`, keys and values `[B, H_kv, S, D]` of one dtype (float32, float16, bfloat16), with H
    a multiple of H_kv: the last T positions of the keys are those of the queries. Returns `[B, H, T, D]`; a row
    that sees no key (T > S) is 0.

    `window`: a row sees only its own position and the window - 1 before it. `softcap` c: scores become
    c·tanh(score / c) (Gemma Team 2024, "Gemma 2"). `slopes` `[H]`: a head adds slope · (key's position - own
    position) to its scores (ALiBi, Press et al. 2021); they take no gradient. `training`: a gradient will be
    taken; without it, not every path has one. Raises ValueError for arrays that don't fit together.
    """
    shape = keys.shape
    if shape != values.shape or not queries.dtype == keys.dtype == values.dtype:
        arrays = ", ".join(f"{x.shape} {x.dtype}" for x in (queries, keys, values))
        raise ValueError(f"attention needs keys and values of one shape, and one dtype: {arrays}")
    operation = TRAINING if training else DECODE if queries.shape[2] <= MOST_DECODED else PREFILL
    return _run(operation, queries, keys, values, shape, scale, window, softcap, slopes, {})


def quantized_attention(
    queries: mx.array,
    keys: Quantized,
    values: Quantized,
    scale: float,
    *,
    group_size: int,
    bits: int,
    window: int | None = None,
    softcap: float | None = None,
    slopes: mx.array | None = None,
) -> mx.array:
    """`attention` on a quantized cache: keys and values as `mx.quantize(..., group_size, bits)` gives them.

    Scales and biases have the queries' dtype. It has no gradient. Raises ValueError for arrays that don't fit.
    """
    packed, scales, biases = keys
    shape = (*scales.shape[:-1], scales.shape[-1] * group_size)
    fit = (
        packed.shape == (*shape[:-1], shape[-1] * bits // 32)
        and biases.shape == scales.shape
        and all(k.shape == v.shape for k, v in zip(keys, values, strict=True))
        and packed.dtype == values[0].dtype == mx.uint32
        and all(x.dtype == queries.dtype for x in (*keys[1:], *values[1:]))
    )
    if not fit:
        arrays = ", ".join(f"{x.shape} {x.dtype}" for x in (*keys, *values))
        form = f"{queries.dtype}, {bits} bits in groups of {group_size}"
        raise ValueError(f"keys and values are not what mx.quantize gives ({form}): {arrays}")
    form = {"group_size": group_size, "bits": bits}
    return _run(QUANTIZED, queries, keys, values, shape, scale, window, softcap, slopes, form)


def _run(operation: Operation, queries, keys, values, key_shape, scale, window, softcap, slopes, form: dict[str, int]):
    B, H, T, D = queries.shape if queries.ndim == 4 else (0, 0, 0, 0)
    if len(key_shape) != 4 or key_shape[0] != B or key_shape[3] != D or not key_shape[1] or H % key_shape[1]:
        problem = "[B, H, T, D] and [B, H_kv, S, D] are needed, H a multiple of H_kv"
        raise ValueError(f"queries {queries.shape} don't fit keys {key_shape}: {problem}")
    K, S = key_shape[1], key_shape[2]
    if queries.dtype not in DTYPE_NAMES:
        raise ValueError(f"attention takes float32, float16 or bfloat16, not {queries.dtype}")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, but a row sees at least itself (1)")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}, it must be positive")
    if slopes is not None:
        if slopes.shape != (H,):
            raise ValueError(f"slopes are {slopes.shape}, one for each of {H} heads is needed")
        slopes = slopes.astype(mx.float32)
    if T > S or queries.size == 0:  # rows before the first key
        blind = mx.zeros_like(queries[:, :, : T - S] if S and queries.size else queries)
        if blind.shape == queries.shape:
            return blind
        seeing = queries[:, :, T - S :]
        out = _run(operation, seeing, keys, values, key_shape, scale, window, softcap, slopes, form)
        return mx.concatenate([blind, out], axis=2)
    case = attention_case(operation, DTYPE_NAMES[queries.dtype], D, H, K, T, S, window, softcap, slopes, **form)
    path = operation.implementation(case)
    return path(queries, keys, values, float(scale), window=window, softcap=softcap, slopes=slopes, **form)
