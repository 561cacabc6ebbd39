"""What computes attention: its operations, which path "auto" prefers for which case, and what a path lacks."""

from __future__ import annotations

from functools import cache
from typing import Any

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.kernels import decode_attention, flash_attention
from mlxlm.kernels.blockwise_attention import blockwise_attention
from mlxlm.kernels.dispatch import Case, Operation, metal_available
from mlxlm.kernels.mlx_attention import mlx_attention, mlx_quantized_attention

MAX_DECODE_QUERIES = decode_attention.MAX_QUERIES  # query rows that count as decoding, in MLX as well
LINEAR_MEMORY_FROM = 1024  # length from which the square of probabilities must not be in memory
_FEATURES = ("window", "softcap", "slopes", "first", "segment_ids")
_DECODE_FEATURES = _FEATURES[:3]  # of the Metal kernels
LENGTHS = (256, 4096)  # least and greatest length that are told apart

_FUSED_DECODE_DIMS = (64, 96, 128, 256)  # of MLX 0.32 on Metal: scaled_dot_product_attention.cpp
_FUSED_DECODE_ROWS = 32  # most rows · heads of a key head there
_FUSED_PROMPT_DIMS = (64, 72, 80, 96, 128)


def attention_case(
    operation, dtype, D, H, K, T, S, window, softcap, slopes, first=None, segment_ids=None, **form: int
) -> Case:
    """The case of a call. Decoding counts T one by one and S up to a power of two; elsewhere T, which S is about,
    goes down to one, so that a case of 1,024 has no shorter length in it."""
    least, most = LENGTHS
    if operation is DECODE or operation is QUANTIZED:
        S = max(least, min(most, 1 << (S - 1).bit_length()))
    else:
        T, S = max(least, min(most, 1 << T.bit_length() - 1)), None
    given = tuple(x is not None for x in (window, softcap, slopes, first, segment_ids))
    return _case(operation, dtype, D, H, K, T, S, given, **form)


@cache  # each token of each layer asks for one of a few
def _case(operation, dtype, D, H, K, T, S, given, group_size=None, key_bits=None, value_bits=None) -> Case:
    sizes = {"D": D, "H": H, "K": K, "group_size": group_size, "key_bits": key_bits, "value_bits": value_bits}
    sizes = {name: size for name, size in {**sizes, "T": T, "S": S}.items() if size is not None}
    features = tuple(name for name, is_given in zip(_FEATURES, given, strict=True) if is_given)
    return Case(operation.name, dtype, tuple(sizes), tuple(sizes.values()), features)


def _plain(queries, keys, values, scale, *, window=None, softcap=None, slopes=None, first=None, segment_ids=None):
    """MLX's operations, which have neither soft cap nor slopes: `_lacks` keeps them away."""
    return mlx_attention(queries, keys, values, scale, window=window, first=first, segment_ids=segment_ids)


def _tiled(queries, keys, values, scale, *, window=None, softcap=None, slopes=None):
    return flash_attention.tiled_attention(queries, keys, values, scale, window=window)


def _lacks(path: str, case: Case) -> str | None:
    """Why a path can't serve a case of attention on plain keys and values."""
    decoding = case.operation == DECODE.name
    in_metal = _DECODE_FEATURES if decoding else ("window",)
    has = {"mlx": ("window", "first", "segment_ids"), "metal": in_metal}.get(path, _FEATURES)
    if special := [name for name in case.features if name not in has]:
        return f"it has no {' and no '.join(special)}"
    if path != "metal":
        return None
    if decoding:
        return _lacks_decode(case)
    D = case.size("D")
    return None if D % 8 == 0 and D <= flash_attention.MAX_HEAD_DIM else f"it has no head dim {D}"


def _lacks_decode(case: Case) -> str | None:
    """Why the Metal kernels of decoding, on plain or quantized keys, can't serve a case."""
    if case.size("D") not in decode_attention.HEAD_DIMS:
        return f"it has no head dim {case.size('D')}"
    if case.size("T") > MAX_DECODE_QUERIES or _rows(case) > decode_attention.MAX_ROWS:
        return f"it takes {MAX_DECODE_QUERIES} query rows, {decode_attention.MAX_ROWS} with the heads of a key head"
    return None


def _lacks_quantized(path: str, case: Case) -> str | None:
    if path != "metal":
        return None
    if "first" in case.features:
        return "it has no first"
    bits, group_size = case.size("key_bits"), case.size("group_size")
    if bits not in (4, 8) or bits != case.size("value_bits") or group_size not in (32, 64):
        return f"it has no {bits} and {case.size('value_bits')} bits in groups of {group_size}"
    return _lacks_decode(case)


def _rows(case: Case) -> int:
    """Query rows that share a key head."""
    return case.size("T") * case.size("H") // case.size("K")


def _prefers_decode(case: Case):
    if ON_CPU or (case.size("D") in _FUSED_DECODE_DIMS and _rows(case) <= _FUSED_DECODE_ROWS):
        return ("mlx", "metal", "blockwise"), "MLX's own"
    return ("metal", "mlx", "blockwise"), f"MLX fuses no head dim {case.size('D')} with {_rows(case)} rows a key head"


def _prefers_prompt(case: Case):
    if ON_CPU and case.size("T") >= LINEAR_MEMORY_FROM:  # MLX fuses nothing there: 4096 x 4096 takes 2.7 GB, not 0.3
        return ("blockwise", "mlx"), "memory linear in the length"
    if ON_CPU or case.size("D") in _FUSED_PROMPT_DIMS:
        return ("mlx", "metal", "blockwise"), "MLX's own"
    return ("metal", "mlx", "blockwise"), f"MLX fuses no head dim {case.size('D')}"


def _prefers_training(case: Case):
    if case.size("T") < LINEAR_MEMORY_FROM:
        return ("mlx", "metal", "blockwise"), "short: MLX keeps the probabilities and need not compute them twice"
    if not ON_CPU and not metal_available() and case.dtype != "float32":
        return ("mlx", "blockwise"), "MLX's own fused gradient on CUDA"
    return ("metal", "blockwise", "mlx"), "memory linear in the length, unless MLX's own was measured to have that too"


def _prefers_quantized(case: Case):
    return ("metal", "mlx"), "MLX has no attention on a quantized cache"


def _trial(case: Case) -> tuple[list[Any], dict[str, Any]]:
    """Queries as they come out of a projection, and keys and values as slices of a cache with room to grow."""
    H, K, D, T = (case.size(name) for name in ("H", "K", "D", "T"))
    S = case.size("S") if "S" in case.names else T
    batch = max(1, 2048 // T) if case.operation == TRAINING.name else 1
    dtype = getattr(mx, case.dtype)
    seeds = mx.random.split(mx.random.key(0), 3)
    shapes = ((batch, T, H, D), (batch, K, S + 3, D), (batch, K, S + 3, D))
    queries, keys, values = (mx.random.normal(s, key=k).astype(dtype) for s, k in zip(shapes, seeds, strict=True))
    given = {"window": S // 2, "softcap": 20.0, "slopes": -(2.0 ** -mx.arange(1, H + 1))}
    given["first"] = mx.arange(batch, dtype=mx.int32) + S // 4
    given["segment_ids"] = mx.broadcast_to(3 * mx.arange(S, dtype=mx.int32) // S, (batch, S))  # three texts
    options = {name: given[name] for name in case.features}
    return [queries.swapaxes(1, 2), keys[:, :, :S], values[:, :, :S], D**-0.5], options


def _quantized_trial(case: Case) -> tuple[list[Any], dict[str, Any]]:
    (queries, keys, values, scale), options = _trial(case)
    form = {name: case.size(name) for name in ("group_size", "key_bits", "value_bits")}
    sides = [
        mx.quantize(x, group_size=form["group_size"], bits=bits) if bits else x
        for x, bits in ((keys, form["key_bits"]), (values, form["value_bits"]))
    ]
    return [queries, *sides, scale], {**form, **options}


def _small(case: Case) -> tuple[Case, ...]:
    """Two key heads and a length that is ragged against every tile."""
    return (case.with_sizes(H=2 * case.size("H") // case.size("K"), K=2, T=70),)


def _small_decode(case: Case) -> tuple[Case, ...]:
    """Two key heads; keys for one threadgroup, and for many, whose results another kernel combines.

    From 13,000 keys on, there are several for every head dim, number of rows and quantization.
    """
    narrow = case.with_sizes(H=2 * case.size("H") // case.size("K"), K=2)
    return narrow.with_sizes(S=70), narrow.with_sizes(S=16411)


def _quantized_decode(queries, keys, values, scale, *, group_size, key_bits, value_bits, **options):
    form = {"group_size": group_size, "bits": key_bits}  # `_lacks_quantized` keeps others away
    return decode_attention.quantized_decode_attention(queries, keys, values, scale, **form, **options)


_PATHS = {
    "mlx": _plain,
    "metal": _tiled,
    "blockwise": blockwise_attention,
}
_DECODE_PATHS = {**_PATHS, "metal": decode_attention.decode_attention}
_QUANTIZED_PATHS = {"mlx": mlx_quantized_attention, "metal": _quantized_decode}

DECODE = Operation("decode_attention", _DECODE_PATHS, _prefers_decode, _trial, _small_decode, _lacks)
PREFILL = Operation("prompt_attention", _PATHS, _prefers_prompt, _trial, _small, _lacks)
TRAINING = Operation("training_attention", _PATHS, _prefers_training, _trial, _small, _lacks, differentiable=(0, 1, 2))
QUANTIZED = Operation(
    "quantized_decode_attention",
    _QUANTIZED_PATHS,
    _prefers_quantized,
    _quantized_trial,
    _small_decode,
    _lacks_quantized,
)
