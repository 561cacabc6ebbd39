"""Causal attention in blocks of queries, with a gradient whose memory is linear in the length.

The backward pass recomputes each block's probabilities from the saved log-sum-exp (Dao et al. 2022, "FlashAttention",
algorithm 4). It is built from MLX operations, so it runs on every device. Each block depends on the one before it, so
that only one block's scores are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.kernels.exp import exp_nonpositive
from mlxlm.kernels.mask import causal_mask, relative_positions
from mlxlm.kernels.sinks import add_sinks

# Bytes of one block's scores in float32; MLX has up to 20 such arrays in memory at once. On a GPU, larger blocks are
# better: they make a smaller graph to dispatch, and the scores don't fit in a cache either way.
BLOCK_BYTES = {"cpu": 16 << 20, "gpu": 128 << 20}
_BLOCK_BYTES = BLOCK_BYTES["cpu" if ON_CPU else "gpu"]
_MIN_ROWS = 32  # matrix products with fewer rows are slow

_Block = tuple[int, int, int, int]  # first query, last query + 1, first key, last key + 1


def blockwise_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    slopes: mx.array | None = None,
    sinks: mx.array | None = None,
    first: mx.array | None = None,
    segment_ids: mx.array | None = None,
) -> mx.array:
    """Compute `mlxlm.kernels.attention` for S >= T, with O(T) memory forward and backward.

    Matrix products use the inputs' dtype, the softmax and the sums over blocks float32. `slopes`, `first` and
    `segment_ids` have no gradient.

    Returns:
        `[B, H, T, D]`.
    """
    B, H, T, D = queries.shape
    kv_heads = keys.shape[1]
    rows = queries.reshape(B, kv_heads, H // kv_heads, T, D)
    slopes = None if slopes is None else slopes.reshape(kv_heads, -1)
    optional = {"slopes": slopes, "first": first, "segment_ids": segment_ids}
    optional = {name: x for name, x in optional.items() if x is not None}
    out, lse = _function(scale, window, softcap, tuple(optional))(rows, keys, values, *optional.values())
    out = out.reshape(B, H, T, -1)
    return out if sinks is None else add_sinks(out, lse.reshape(B, H, T), sinks)


def block_rows(T: int, S: int, heads: int, window: int | None, block_bytes: int | None = None) -> int:
    """Return the number of queries per block.

    Args:
        T: Number of queries.
        S: Number of keys.
        heads: Heads times batch size.
        window: Sliding window.
        block_bytes: Bytes of a block's scores, default for this device.
    """
    reach = min(S, T // 8 + (window or S))  # the most keys that a block sees
    return max(_MIN_ROWS, min((block_bytes or _BLOCK_BYTES) // (4 * heads * reach), T // 8))


@cache
def _function(
    scale: float, window: int | None, softcap: float | None, names: tuple[str, ...]
) -> Callable[..., tuple[mx.array, mx.array]]:
    """Make the differentiable function with these constants. It returns (output, log-sum-exp).

    `names` are the optional arrays, which follow queries, keys and values.
    """

    @mx.custom_function
    def attend(queries: mx.array, keys: mx.array, values: mx.array, *others: mx.array) -> tuple[mx.array, mx.array]:
        return _forward(_Scores(queries, keys, scale, window, softcap, **dict(zip(names, others, strict=True))), values)

    @attend.vjp
    def attend_vjp(
        primals: list[mx.array], cotangents: list[mx.array], outputs: list[mx.array]
    ) -> tuple[mx.array, ...]:
        queries, keys, values, *others = primals
        scores = _Scores(queries, keys, scale, window, softcap, **dict(zip(names, others, strict=True)))
        gradients = _backward(scores, values, outputs, cotangents)
        return (*gradients, *(mx.zeros_like(x) for x in others))

    return attend


@dataclass
class _Scores:
    """Scores of queries `[B, K, G, T, D]` and keys `[B, K, S, D]`, one block of queries at a time.

    K is the number of key heads, G that of query heads per key head.
    """

    queries: mx.array
    keys: mx.array
    scale: float
    window: int | None
    softcap: float | None
    slopes: mx.array | None = None
    first: mx.array | None = None
    segment_ids: mx.array | None = None

    def __post_init__(self) -> None:
        self.B, self.K, self.G, self.T, _ = self.queries.shape
        self.S = self.keys.shape[2]

    def blocks(self) -> Iterator[_Block]:
        """Yield blocks of queries with all keys that they see."""
        T, S, window = self.T, self.S, self.window
        rows = block_rows(T, S, self.B * self.K * self.G, window)
        for start in range(0, T, rows):
            stop = min(start + rows, T)
            seen = S - T + stop
            first = 0 if window is None else max(0, seen - (stop - start) - window + 1)
            yield start, stop, first, seen

    def rows(self, x: mx.array, start: int, stop: int) -> mx.array:
        """Slice rows of x `[B, K, G, T, n]` and stack the heads of a group: `[B, K, G·rows, n]`."""
        return x[:, :, :, start:stop].reshape(self.B, self.K, self.G * (stop - start), x.shape[-1])

    def unstacked(self, x: mx.array) -> mx.array:
        """Undo the stacking of `rows`."""
        return x.reshape(self.B, self.K, self.G, x.shape[2] // self.G, x.shape[-1])

    def __call__(self, rows: mx.array, block: _Block) -> tuple[mx.array, mx.array | None]:
        """Return masked scores of stacked rows in float32, and the derivative of the soft cap, None without one."""
        _, _, first, seen = block
        scores = ((rows * self.scale) @ self.keys[:, :, first:seen].swapaxes(-1, -2)).astype(mx.float32)
        slope = None
        if self.softcap is not None:
            capped = mx.tanh(scores / self.softcap)
            scores, slope = self.softcap * capped, 1 - capped.square()
        return scores + self._bias(block), slope

    def _bias(self, block: _Block) -> mx.array:
        """The mask (0 or -inf) plus the ALiBi bias."""
        start, stop, first, seen = block
        distance = relative_positions(stop - start, seen - first)
        padding = None if self.first is None else self.first - first
        ids = self.segment_ids
        segments = None if ids is None else (ids[:, seen - (stop - start) : seen], ids[:, first:seen])
        bias = mx.where(causal_mask(distance, self.window, padding, segments), 0.0, -mx.inf)
        if self.slopes is None:
            return mx.tile(bias, (self.G, 1))
        bias = bias[..., None, :, :] + self.slopes[:, :, None, None] * distance  # [.., K, G, rows, keys]
        return bias.reshape(*bias.shape[:-4], self.K, -1, seen - first)


def _forward(scores: _Scores, values: mx.array) -> tuple[mx.array, mx.array]:
    outs: list[mx.array] = []
    statistics: list[mx.array] = []
    for block in scores.blocks():
        start, stop, first, seen = block
        rows = scores.rows(scores.queries, start, stop)
        if outs:
            (rows,) = mx.depends([rows], [outs[-1]])
        s, _ = scores(rows, block)
        maximum = mx.max(s, axis=-1, keepdims=True)
        e = exp_nonpositive(s - maximum)
        total = mx.sum(e, axis=-1, keepdims=True)
        out = (e.astype(values.dtype) @ values[:, :, first:seen]) / total
        outs.append(scores.unstacked(out.astype(values.dtype)))
        statistics.append(scores.unstacked(maximum + mx.log(total)))
    return mx.concatenate(outs, axis=3), mx.concatenate(statistics, axis=3)


def _backward(
    scores: _Scores, values: mx.array, outputs: list[mx.array], cotangents: list[mx.array]
) -> tuple[mx.array, mx.array, mx.array]:
    """Return the gradients of queries, keys and values."""
    dtype, (out, statistics), (cotangent, statistics_cotangent) = values.dtype, outputs, cotangents
    # The sum over keys of dP·P, computed without P as cotangent · output (Dao et al. 2022, B.4).
    delta = mx.sum((cotangent * out).astype(mx.float32), axis=-1, keepdims=True) - statistics_cotangent
    dq: list[mx.array] = []
    dk, dv = (mx.zeros(x.shape, mx.float32) for x in (scores.keys, values))
    for block in scores.blocks():
        start, stop, first, seen = block
        rows, do, lse, d = (scores.rows(x, start, stop) for x in (scores.queries, cotangent, statistics, delta))
        if dq:
            rows, do = mx.depends([rows, do], [dq[-1], dk, dv])
        s, slope = scores(rows, block)
        probs = exp_nonpositive(s - lse)
        ds = probs * ((do @ values[:, :, first:seen].swapaxes(-1, -2)).astype(mx.float32) - d)
        ds = (ds if slope is None else ds * slope).astype(dtype)
        dq.append(scores.unstacked(ds @ scores.keys[:, :, first:seen]) * scores.scale)
        dk = dk.at[:, :, first:seen].add((ds.swapaxes(-1, -2) @ rows).astype(mx.float32))
        dv = dv.at[:, :, first:seen].add((probs.astype(dtype).swapaxes(-1, -2) @ do).astype(mx.float32))
    return mx.concatenate(dq, axis=3), (dk * scores.scale).astype(dtype), dv.astype(dtype)
