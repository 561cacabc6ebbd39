"""Attention of one query per row over buffers of a fixed length, of which each row uses a part.

With lengths that change every 256 tokens instead of every token, a decoding step can be compiled. Masked keys have
weights of exactly 0.
"""

from __future__ import annotations

from typing import Any, Protocol

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.kernels.attention import DECODE, LENGTHS, QUANTIZED, attention_case
from mlxlm.kernels.dispatch import DTYPE_NAMES, choose_path, mode
from mlxlm.kernels.exp import exp_nonpositive
from mlxlm.kernels.mlx_attention import MANY_SCORES
from mlxlm.kernels.quantized_kv import QuantizedKV, quantization
from mlxlm.kernels.sinks import add_sinks


class VisibleKeys(Protocol):
    """Which keys each row sees: at least its own, which is the last."""

    @property
    def ranges(self) -> mx.array:
        """The first key of each row, and the one after its last, int32 `[B, 2]`."""

    @property
    def distances(self) -> mx.array:
        """Key position minus query position, int32 `[S]`."""

    def mask(self, window: int | None, heads: int = 1) -> mx.array:
        """The keys in the range and the window, bool `[B, heads, 1, S]`."""


def prepare_masked_attention(
    queries: tuple[int, int, mx.Dtype], kv_heads: int, features: tuple[str, ...], **quantization: int
) -> bool:
    """Choose the kernels of `masked_attention`, and check those that are used for the first time on this machine.

    Args:
        queries: Head dim, number of heads and dtype.
        kv_heads: Number of key heads.
        features: "window", "softcap", "slopes", "sinks": the arguments in use.
        quantization: group_size, key_bits and value_bits, if keys or values are quantized.

    Returns:
        Whether it supports them: not blocks of queries, if the user requires those.
    """
    head_dim, heads, dtype = queries
    if dtype not in DTYPE_NAMES or mode() == "blockwise":
        return False
    operation = QUANTIZED if quantization and not (ON_CPU and heads > kv_heads) else DECODE
    form = quantization if operation is QUANTIZED else {}
    for i in range(LENGTHS[0].bit_length() - 1, LENGTHS[1].bit_length()):
        sizes = head_dim, heads, kv_heads, 1, 1 << i
        choose_path(operation, attention_case(operation, DTYPE_NAMES[dtype], *sizes, features, **form))
    return True


def masked_attention(
    queries: mx.array,
    keys: mx.array | QuantizedKV,
    values: mx.array | QuantizedKV,
    scale: float,
    visible: VisibleKeys,
    *,
    window: int | None = None,
    softcap: float | None = None,
    slopes: mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Compute softmax(queries · keysᵀ · scale) · values over the visible keys.

    Args:
        queries: `[B, H, 1, D]`.
        keys: `[B, H_kv, S, D]` in the same dtype, or `QuantizedKV`.
        values: As the keys.
        scale: Multiplies the scores.
        visible: Which keys each row sees.
        window: As in `attention`, like the following options.
        softcap: Scores become softcap · tanh(score / softcap).
        slopes: float32 `[H]`, ALiBi.
        sinks: `[H]`, attention sinks.

    Returns:
        `[B, H, 1, D]`.
    """
    B, H, _, D = queries.shape
    K, S = keys.shape[1:3]
    if ON_CPU and H > K:  # as in `attention`
        keys, values = (x.dequantized() if isinstance(x, QuantizedKV) else x for x in (keys, values))
    options = {"window": window, "softcap": softcap, "slopes": slopes, "sinks": sinks}
    form = quantization(keys, values)
    features, operation = tuple(name for name, x in options.items() if x is not None), QUANTIZED if form else DECODE
    case = attention_case(operation, DTYPE_NAMES[queries.dtype], D, H, K, 1, S, features, **form)
    if (kernel := operation.implementation(case)) is operation.paths["metal"]:
        arrays = (x.arrays if isinstance(x, QuantizedKV) else x for x in (keys, values))
        return kernel(queries, *arrays, scale, ranges=visible.ranges, **options, **form)
    many = ON_CPU and B * H * S >= MANY_SCORES
    if operation is DECODE and not many and softcap is None and slopes is None:
        # In each layer, MLX's kernel would copy a mask of several rows that isn't there for each head.
        mask = visible.mask(window, 1 if ON_CPU or B == 1 else H)
        sinks = None if sinks is None else sinks.astype(queries.dtype)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    mask = visible.mask(window)
    shape: tuple[int, ...] = B, K, H // K, D
    if isinstance(keys, mx.array) and isinstance(values, mx.array):
        # One product per query head: for one row, BLAS reads the keys at the memory's speed.
        shape, keys, values = (B, K, H // K, 1, D), keys[:, :, None], values[:, :, None]
    scores = _product((queries * scale).reshape(shape), keys, transpose=True)
    scores = scores.astype(mx.float32).reshape(B, H, 1, S)
    if softcap is not None:
        scores = softcap * mx.tanh(scores / softcap)
    if slopes is not None:
        scores = scores + slopes[:, None, None] * visible.distances
    scores = mx.where(mask, scores, -mx.inf)
    if many:
        maximum = mx.max(scores, axis=-1, keepdims=True)
        e = exp_nonpositive(scores - maximum)
        probs = mx.where(mask, e, 0)  # its exp(-inf) is 1.6e-38
        total = mx.sum(probs, axis=-1, keepdims=True)
        if sinks is not None:
            total = total + mx.exp(sinks[:, None, None] - maximum)
    else:
        probs, total = mx.softmax(scores, axis=-1), None
    out = _product(probs.astype(queries.dtype).reshape(*shape[:-1], S), values, transpose=False).reshape(B, H, 1, D)
    if total is not None:
        return (out / total).astype(queries.dtype)
    return out if sinks is None else add_sinks(out, mx.logsumexp(scores, axis=-1), sinks)


def _product(rows: mx.array, side: Any, transpose: bool) -> mx.array:
    if not isinstance(side, QuantizedKV):
        return rows @ (side.swapaxes(-1, -2) if transpose else side)
    return mx.quantized_matmul(rows, *side.arrays, transpose=transpose, group_size=side.group_size, bits=side.bits)
