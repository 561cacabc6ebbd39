"""Causal grouped-query attention: one contract, and the choice of what computes it."""

from __future__ import annotations

from typing import Any

from mlxlm._mlx import ON_CPU, mx
from mlxlm.kernels import decode_attention, tiled_attention
from mlxlm.kernels.blockwise import blockwise_attention
from mlxlm.kernels.dispatch import Case, Operation, dtype_name, round_up
from mlxlm.kernels.plain_attention import plain_attention, plain_quantized_attention

LINEAR_MEMORY_FROM = 1024  # length from which a gradient must not keep its probabilities

_FUSED_DECODE_DIMS = (64, 96, 128, 192, 256)  # of MLX 0.32 on Metal: scaled_dot_product_attention.cpp
_FUSED_PROMPT_DIMS = (64, 72, 80, 96, 128)
_DECODE_ROWS = 8  # most query rows that count as decoding, as in MLX
_FUSED_DECODE_ROWS = 32  # most rows · heads per key head in MLX's kernel

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

    queries `[B, H, T, D]`, keys and values `[B, H_kv, S, D]` of one dtype, with H a multiple of H_kv: the
    last T positions of the keys are those of the queries. Returns `[B, H, T, D]`; a row that sees no key
    (T > S) is 0.

    `window`: a row sees only its own position and the window - 1 before it. `softcap` c: scores become
    c·tanh(score / c) (Gemma Team 2024, "Gemma 2"). `slopes` float32 `[H]`: a head adds slope · (key's
    position - own position) to its scores (ALiBi, Press et al. 2021); they take no gradient. `training`: a
    gradient will be taken. Raises ValueError for arrays that don't fit together.
    """
    if keys.shape != values.shape or not queries.dtype == keys.dtype == values.dtype:
        arrays = ", ".join(f"{x.shape} {dtype_name(x)}" for x in (queries, keys, values))
        raise ValueError(f"attention needs keys and values of one shape, and one dtype: {arrays}")
    _check(queries, keys.shape, window, softcap, slopes)
    operation = TRAINING if training else DECODE if queries.shape[2] <= _DECODE_ROWS else PREFILL
    return _run(operation, queries, keys, values, scale, {}, window, softcap, slopes)


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

    It has no gradient. Raises ValueError for arrays that don't fit together.
    """
    shape = (*keys[1].shape[:-1], keys[1].shape[-1] * group_size)
    if any(k.shape != v.shape for k, v in zip(keys, values, strict=True)) or keys[0].shape[-1] * 32 != shape[-1] * bits:
        arrays = ", ".join(str(x.shape) for x in (*keys, *values))
        raise ValueError(f"these are not keys and values of {bits} bits in groups of {group_size}: {arrays}")
    _check(queries, shape, window, softcap, slopes)
    form = {"group_size": group_size, "bits": bits}
    return _run(QUANTIZED, queries, keys, values, scale, form, window, softcap, slopes)


def _check(queries, keys: tuple[int, ...], window, softcap, slopes) -> None:
    if queries.ndim != 4 or len(keys) != 4:
        raise ValueError(f"attention needs queries [B, H, T, D] and keys [B, H_kv, S, D]: {queries.shape}, {keys}")
    (B, H, _, D), (key_batch, kv_heads, S, key_dim) = queries.shape, keys
    if key_batch != B or key_dim != D or kv_heads == 0 or H % kv_heads or S == 0:
        problem = "one batch size and head dim, heads a multiple of the keys', and at least one key are needed"
        raise ValueError(f"queries {queries.shape} don't fit keys {keys}: {problem}")
    if window is not None and window < 1:
        raise ValueError(f"window is {window}, but a row sees at least itself (1)")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}, it must be positive")
    if slopes is not None and slopes.shape != (H,):
        raise ValueError(f"slopes are {slopes.shape}, one for each of {H} heads is needed")


def _run(operation: Operation, queries, keys, values, scale, form: dict[str, int], window, softcap, slopes):
    H, T = queries.shape[1:3]
    kv_heads, S = (keys[0] if form else keys).shape[1:3]
    blind = max(0, T - S)  # rows before the first key
    seeing = queries[:, :, blind:] if blind else queries
    options = {"window": window, "softcap": softcap, "slopes": slopes}
    features = tuple(name for name, value in options.items() if value is not None)
    case = attention_case(operation, queries, kv_heads, T - blind, S, features, **form)
    out = operation.implementation(case)(seeing, keys, values, scale, **form, **options)
    return mx.concatenate([mx.zeros_like(queries[:, :, :blind]), out], axis=2) if blind else out


def attention_case(operation: Operation, queries, kv_heads: int, T: int, S: int, features=(), **form: int) -> Case:
    """The case of a call. T counts one by one in decoding; in training and prompts S is about T."""
    H, D = queries.shape[1], queries.shape[3]
    lengths = [("T", T if T <= _DECODE_ROWS else round_up(T))]
    if operation in (DECODE, QUANTIZED):
        lengths.append(("S", round_up(S)))
    sizes = (("D", D), ("H", H), ("K", kv_heads), *form.items(), *lengths)
    return Case(operation.name, dtype_name(queries), sizes, features)


def _plain(queries, keys, values, scale, *, window=None, softcap=None, slopes=None):
    return plain_attention(queries, keys, values, scale, window=window)  # _lacks keeps the other options away


def _tiled(queries, keys, values, scale, *, window=None, softcap=None, slopes=None):
    return tiled_attention.tiled_attention(queries, keys, values, scale, window=window)


def _lacks(path: str, case: Case) -> str | None:
    """Why a path can't serve a case of attention on plain keys and values."""
    decoding = case.operation == DECODE.name
    special = [name for name in case.features if name != "window"]
    if special and (path == "mlx" or (path == "metal" and not decoding)):
        return f"it has no {' and no '.join(special)}"
    if path != "metal":
        return None
    if decoding:
        return _lacks_decode(case)
    fits = case["D"] % 8 == 0 and case["D"] <= tiled_attention.MAX_HEAD_DIM
    return None if fits else f"it has no head dim {case['D']}"


def _lacks_decode(case: Case) -> str | None:
    """Why the Metal kernels of decoding, on plain or quantized keys, can't serve a case."""
    if case["D"] not in decode_attention.HEAD_DIMS:
        return f"it has no head dim {case['D']}"
    if case["T"] > decode_attention.MAX_QUERIES or case["T"] * case["H"] // case["K"] > decode_attention.MAX_ROWS:
        most = f"{decode_attention.MAX_QUERIES} query rows, {decode_attention.MAX_ROWS} with the heads of a key head"
        return f"it takes at most {most}"
    return None


def _lacks_quantized(path: str, case: Case) -> str | None:
    if path != "metal":
        return None
    if case["bits"] not in (4, 8) or case["group_size"] not in (32, 64):
        return f"it has no {case['bits']} bits in groups of {case['group_size']}"
    return _lacks_decode(case)


def _prefers_decode(case: Case):
    rows = case["T"] * case["H"] // case["K"]
    if ON_CPU or (case["D"] in _FUSED_DECODE_DIMS and rows <= _FUSED_DECODE_ROWS):
        return ("mlx", "metal", "blockwise"), "MLX's own"
    return ("metal", "mlx", "blockwise"), f"MLX fuses no head dim {case['D']} with {rows} rows for a key head"


def _prefers_prompt(case: Case):
    if ON_CPU or case["D"] in _FUSED_PROMPT_DIMS:
        return ("mlx", "metal", "blockwise"), "MLX's own"
    return ("metal", "mlx", "blockwise"), f"MLX fuses no head dim {case['D']}"


def _prefers_training(case: Case):
    if case["T"] >= LINEAR_MEMORY_FROM:
        return ("metal", "blockwise"), "memory linear in the length"
    return ("mlx", "metal", "blockwise"), "short: MLX keeps the probabilities instead of computing them twice"


def _prefers_quantized(case: Case):
    return ("metal", "mlx"), "MLX has no attention on a quantized cache"


def _trial(case: Case, small: bool) -> tuple[list[Any], dict[str, Any]]:
    """Random queries, keys and values of a case; small: a few of them, ragged against every tile."""
    H, K, D, T = (case[name] for name in ("H", "K", "D", "T"))
    S = dict(case.sizes).get("S", T)
    batch = 1
    if small:
        H, K = H // K * 2, 2
        T = T if T <= _DECODE_ROWS else 40
        S = 70
    elif case.operation == TRAINING.name:
        batch = max(1, 2048 // T)
    dtype = getattr(mx, case.dtype)
    keys = mx.random.split(mx.random.key(0), 3)
    shapes = ((batch, H, T, D), (batch, K, S, D), (batch, K, S, D))
    arrays = [mx.random.normal(shape, key=key).astype(dtype) for shape, key in zip(shapes, keys, strict=True)]
    given = {"window": S // 2, "softcap": 20.0, "slopes": -(2.0 ** -mx.arange(1, H + 1))}
    options = {name: given[name] for name in case.features}
    return [*arrays, D**-0.5], options


def _quantized_trial(case: Case, small: bool) -> tuple[list[Any], dict[str, Any]]:
    (queries, keys, values, scale), options = _trial(case, small)
    form = {"group_size": case["group_size"], "bits": case["bits"]}
    return [queries, mx.quantize(keys, **form), mx.quantize(values, **form), scale], {**form, **options}


_PATHS = {"mlx": _plain, "metal": _tiled, "blockwise": blockwise_attention}
DECODE = Operation(
    "decode_attention",
    {**_PATHS, "metal": decode_attention.decode_attention},
    _prefers_decode,
    _trial,
    _lacks,
)
PREFILL = Operation("prompt_attention", _PATHS, _prefers_prompt, _trial, _lacks)
TRAINING = Operation("training_attention", _PATHS, _prefers_training, _trial, _lacks, differentiable=(0, 1, 2))
QUANTIZED = Operation(
    "quantized_decode_attention",
    {"mlx": plain_quantized_attention, "metal": decode_attention.quantized_decode_attention},
    _prefers_quantized,
    _quantized_trial,
    _lacks_quantized,
)
