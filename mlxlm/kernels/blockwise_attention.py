"""Causal attention in blocks of query rows, with a gradient whose memory is linear in the length.

The backward pass computes each block's probabilities again from the saved log-sum-exp instead of keeping
them (Dao et al. 2022, "FlashAttention", algorithm 4), here in MLX's own operations: it runs on every device.
Each block waits for the one before it, so that one block's scores exist at a time.
"""

from __future__ import annotations

from functools import cache

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.kernels.exp import exp_nonpositive
from mlxlm.kernels.mask import causal_mask, relative_positions

# Of one block's scores in float32; MLX holds up to 20 such arrays at once. Fewer blocks make a smaller graph,
# which counts where it is dispatched to a GPU and memory is not in a cache either way.
BLOCK_BYTES = {"cpu": 16 << 20, "gpu": 128 << 20}
_BLOCK_BYTES = BLOCK_BYTES["cpu" if ON_CPU else "gpu"]
_LEAST_ROWS = 32  # products of fewer rows are slow


def blockwise_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    slopes: mx.array | None = None,
    first: mx.array | None = None,
    segment_ids: mx.array | None = None,
) -> mx.array:
    """`mlxlm.kernels.attention` for S >= T, with O(T) memory forward and backward. Returns `[B, H, T, D]`.

    Products run in the inputs' dtype, the softmax and the sums over blocks in float32. `slopes`, `first` and
    `segment_ids` take no gradient.
    """
    B, H, T, D = queries.shape
    kv_heads = keys.shape[1]
    rows = queries.reshape(B, kv_heads, H // kv_heads, T, D)
    given = {
        "slopes": None if slopes is None else slopes.reshape(kv_heads, -1),
        "first": first,
        "segment_ids": segment_ids,
    }
    given = {name: x for name, x in given.items() if x is not None}
    out, _ = _function(scale, window, softcap, tuple(given))(rows, keys, values, *given.values())
    return out.reshape(B, H, T, D)


def block_rows(T: int, heads: int, reach: int, block_bytes: int | None = None) -> int:
    """Query rows of a block of T, for so many heads in the batch, each row having up to `reach` scores; here, or where
    a block has so many bytes."""
    return max(_LEAST_ROWS, min((block_bytes or _BLOCK_BYTES) // (4 * heads * reach), T // 8))


@cache
def _function(scale: float, window: int | None, softcap: float | None, given: tuple[str, ...]):
    """The differentiable function of these constants, with the arrays `given`: (output, log-sum-exp)."""

    @mx.custom_function
    def attend(queries, keys, values, *others):
        return _forward(_Scores(queries, keys, scale, window, softcap, **dict(zip(given, others, strict=True))), values)

    @attend.vjp
    def attend_vjp(primals, cotangents, outputs):
        queries, keys, values, *others = primals
        scores = _Scores(queries, keys, scale, window, softcap, **dict(zip(given, others, strict=True)))
        gradients = _backward(scores, values, *outputs, cotangents[0])
        return (*gradients, *(mx.zeros_like(x) for x in others))

    return attend


class _Scores:
    """Scores of queries `[B, K, G, T, D]` with keys `[B, K, S, D]`, one block of rows at a time."""

    def __init__(self, queries, keys, scale, window, softcap, slopes=None, first=None, segment_ids=None):
        self.queries, self.keys = queries, keys
        self.scale, self.window, self.softcap, self.slopes, self.first = scale, window, softcap, slopes, first
        self.segment_ids = segment_ids
        self.B, self.K, self.G, self.T, _ = queries.shape
        self.S = keys.shape[2]

    def blocks(self):
        """(first row, last row + 1, first key, last key + 1), the keys being those that any row sees."""
        reach = min(self.S, self.T // 8 + (self.window or self.S))
        rows = block_rows(self.T, self.B * self.K * self.G, reach)
        for start in range(0, self.T, rows):
            stop = min(start + rows, self.T)
            seen = self.S - self.T + stop
            first = 0 if self.window is None else max(0, seen - (stop - start) - self.window + 1)
            yield start, stop, first, seen

    def rows(self, x: mx.array, start: int, stop: int) -> mx.array:
        """Rows of `[B, K, G, T, n]`, the heads of a group stacked: `[B, K, G·rows, n]`."""
        return x[:, :, :, start:stop].reshape(self.B, self.K, self.G * (stop - start), x.shape[-1])

    def unstacked(self, x: mx.array) -> mx.array:
        return x.reshape(self.B, self.K, self.G, x.shape[2] // self.G, x.shape[-1])

    def __call__(self, rows: mx.array, block) -> tuple[mx.array, mx.array | None]:
        """Masked scores of stacked rows, float32; and d capped / d raw of the soft cap, if there is one."""
        start, stop, first, seen = block
        scores = ((rows * self.scale) @ self.keys[:, :, first:seen].swapaxes(-1, -2)).astype(mx.float32)
        slope = None
        if self.softcap is not None:
            capped = mx.tanh(scores / self.softcap)
            scores, slope = self.softcap * capped, 1 - capped.square()
        return scores + self._bias(start, stop, first, seen), slope

    def _bias(self, start, stop, first, seen):
        """-inf where a row doesn't see a key, ALiBi's slope times distance where it does."""
        apart = relative_positions(stop - start, seen - first)
        begins = None if self.first is None else self.first - first
        of = None if self.segment_ids is None else (self.segment_ids[:, start:stop], self.segment_ids[:, first:seen])
        bias = mx.where(causal_mask(apart, self.window, begins, of), 0.0, -mx.inf)
        if self.slopes is None:
            return mx.tile(bias, (self.G, 1))
        bias = bias[..., None, :, :] + self.slopes[:, :, None, None] * apart  # [.., K, G, rows, keys]
        return bias.reshape(*bias.shape[:-4], self.K, -1, seen - first)


def _forward(scores: _Scores, values: mx.array) -> tuple[mx.array, mx.array]:
    outs, statistics = [], []
    for block in scores.blocks():
        start, stop, first, seen = block
        rows = scores.rows(scores.queries, start, stop)
        if outs:
            (rows,) = mx.depends([rows], [outs[-1]])
        s, _ = scores(rows, block)
        top = mx.max(s, axis=-1, keepdims=True)
        e = _exp(s - top)
        total = mx.sum(e, axis=-1, keepdims=True)
        out = (e.astype(values.dtype) @ values[:, :, first:seen]) / total
        outs.append(scores.unstacked(out.astype(values.dtype)))
        statistics.append(scores.unstacked(top + mx.log(total)))
    return mx.concatenate(outs, axis=3), mx.concatenate(statistics, axis=3)


def _backward(scores: _Scores, values, out, statistics, cotangent):
    """Gradients by queries, keys and values."""
    dtype = values.dtype
    # sum over keys of dP·P, without P: the row's cotangent times its output (Dao et al. 2022, B.4).
    delta = mx.sum((cotangent * out).astype(mx.float32), axis=-1, keepdims=True)
    dq = []
    dk, dv = (mx.zeros(values.shape, mx.float32) for _ in range(2))
    for block in scores.blocks():
        start, stop, first, seen = block
        rows, do, lse, d = (scores.rows(x, start, stop) for x in (scores.queries, cotangent, statistics, delta))
        if dq:
            rows, do = mx.depends([rows, do], [dq[-1], dk, dv])
        s, slope = scores(rows, block)
        probs = _exp(s - lse)
        ds = probs * ((do @ values[:, :, first:seen].swapaxes(-1, -2)).astype(mx.float32) - d)
        ds = (ds if slope is None else ds * slope).astype(dtype)
        dq.append(scores.unstacked(ds @ scores.keys[:, :, first:seen]) * scores.scale)
        dk = dk.at[:, :, first:seen].add((ds.swapaxes(-1, -2) @ rows).astype(mx.float32))
        dv = dv.at[:, :, first:seen].add((probs.astype(dtype).swapaxes(-1, -2) @ do).astype(mx.float32))
    return mx.concatenate(dq, axis=3), (dk * scores.scale).astype(dtype), dv.astype(dtype)


def _exp(x: mx.array) -> mx.array:
    return exp_nonpositive(x) if ON_CPU else mx.exp(x)
