"""Metal attention for training, with memory linear in the length, forward and backward.

FlashAttention-2 (Dao 2023, arXiv 2307.08691): scores are computed in tiles and never stored. The gradients recompute
them from the log-sum-exp of each row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

from mlxlm.backend.mlx import mx
from mlxlm.kernels.metal import MetalKernel, Output, scalar
from mlxlm.kernels.sinks import add_sinks

MAX_HEAD_DIM = 128
_FULL_GRID = 160  # threadgroups: four for each of 40 cores, the most of an M1 to M4 Max
_MIN_TILES = 8  # staged tiles per threadgroup below which a grid isn't split

_kernel = partial(MetalKernel, contiguous=False, headers=("common.h", "attention_tiles.h"))
_FORWARD = _kernel("attention_forward", ("queries", "keys", "values", "scale", "ranges"), ("output", "lse"))
_GRAD_QUERY = _kernel(
    "attention_grad_query",
    ("queries", "keys", "values", "output", "lse", "output_grad", "lse_grad", "scale", "ranges"),
    ("query_grad", "delta"),
)
_GRAD_KEY_VALUE = _kernel(
    "attention_grad_key_value",
    ("queries", "keys", "values", "output_grad", "lse", "delta", "scale", "ranges"),
    ("key_grad", "value_grad"),
)


def tiled_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    *,
    window: int | None = None,
    sinks: mx.array | None = None,
    segment_ids: mx.array | None = None,
) -> mx.array:
    """Compute causal attention with a gradient: query t sees the keys up to S - T + t. Sums are float32.

    The arguments are not checked: `mlxlm.kernels.attention` does that.

    Args:
        queries: `[B, H, T, D]`, float32, float16 or bfloat16, with any strides. D is a multiple of 8 up to 128.
        keys: `[B, H_kv, S, D]` in the same dtype, with any strides. H is a multiple of H_kv.
        values: As the keys.
        scale: Multiplies the scores.
        window: Sliding window: a query sees only the last `window` keys, including its own.
        sinks: `[H]`, attention sinks.
        segment_ids: int32 `[B, S]`, non-decreasing: a query only sees keys of its own text.

    Returns:
        `[B, H, T, D]` in the inputs' dtype. A query that sees no key (T > S) gives 0 and has no gradient.
    """
    segments = () if segment_ids is None else (segment_ids,)
    output, lse = attention_with_lse(float(scale), window)(queries, keys, values, *segments)
    return output if sinks is None else add_sinks(output, lse, sinks)


@cache
def attention_with_lse(scale: float, window: int | None) -> Callable[..., tuple[mx.array, mx.array]]:
    """Make the differentiable function (queries, keys, values) -> (output, log-sum-exp of each row's scores).

    A fourth argument, segment_ids, is optional and has no gradient. The log-sum-exp is natural, float32 `[B, H, T]`,
    and -inf for a query that sees no key.
    """

    @mx.custom_function
    def attend(queries: mx.array, keys: mx.array, values: mx.array, *segments: mx.array) -> tuple[mx.array, mx.array]:
        key_ranges, _ = _visible(queries, keys, window, *segments)
        inputs = [queries, keys, values, scalar(scale, mx.float32), key_ranges]
        output, lse = _launch(_FORWARD, queries, inputs, [_like(queries), (queries.shape[:3], mx.float32)])
        return output, lse

    @attend.vjp
    def attend_vjp(
        primals: list[mx.array], cotangents: list[mx.array], outputs: list[mx.array]
    ) -> tuple[mx.array, ...]:
        queries, keys, values, *segments = primals
        output_grad, lse_grad = cotangents
        output, lse = outputs
        key_ranges, query_ranges = _visible(queries, keys, window, *segments)
        factor = scalar(scale, mx.float32)
        inputs = [queries, keys, values, output, lse, output_grad, lse_grad, factor, key_ranges]
        query_grad, delta = _launch(_GRAD_QUERY, queries, inputs, [_like(queries), _like(lse)])
        inputs = [queries, keys, values, output_grad, lse, delta, factor, query_ranges]
        key_grad, value_grad = _launch_grad_key_value(queries, keys, inputs)
        return query_grad, key_grad, value_grad, *(mx.zeros_like(x) for x in segments)

    return attend


def _like(x: mx.array) -> Output:
    return x.shape, x.dtype


def _visible(
    queries: mx.array, keys: mx.array, window: int | None, segment_ids: mx.array | None = None
) -> tuple[mx.array, mx.array]:
    """Return which keys each query sees, and which queries see each key: int32 `[B, T, 2]` and `[B, S, 2]`.

    A range goes from the first to the one after the last.
    """
    (B, _, T, _), S = queries.shape, keys.shape[2]
    index, positions = mx.arange(S), mx.arange(S - T, S)
    first, end = mx.zeros((T,), mx.int32), mx.full((S,), T, mx.int32)
    if segment_ids is not None:
        edge, begins = mx.ones((B, 1), mx.bool_), segment_ids[:, 1:] != segment_ids[:, :-1]
        first = mx.cummax(mx.where(mx.concatenate([edge, begins], axis=1), index, 0), axis=1)[:, S - T :]
        end = mx.cummin(mx.where(mx.concatenate([begins, edge], axis=1), index + 1, S), axis=1, reverse=True) - (S - T)
    if window is not None:
        first = mx.maximum(first, positions - (window - 1))
        end = mx.minimum(end, index + (window - S + T))
    key_ranges = mx.stack(mx.broadcast_arrays(first, positions + 1), axis=-1)
    query_ranges = mx.stack(mx.broadcast_arrays(mx.maximum(index - (S - T), 0), end), axis=-1)
    return mx.broadcast_to(key_ranges, (B, T, 2)), mx.broadcast_to(query_ranges, (B, S, 2))


@dataclass(frozen=True)
class _Division:
    """How a threadgroup divides its work; see `metal_kernels/attention_tiles.h`.

    Compiled for D = 64 and 128 with Mesa's open-source AGX compiler for M1/M2, without LLVM's pass that splits loads of
    vectors, the kernels have at most one spill in bfloat16, and up to 24 in float32; in plain -O1, up to 40 in both.

    Args:
        held: Blocks of 8 rows that a SIMD group holds in registers.
        staged: Rows in each buffer of threadgroup memory, of which there are 1 + `parts`: 32 KiB at most.
        parts: SIMD groups that share the work on the rows that they hold.
    """

    held: int
    staged: int
    parts: int

    @classmethod
    def of(cls, kernel: MetalKernel, D: int, itemsize: int) -> _Division:
        parts = 1 if D <= 64 or kernel is _FORWARD else 2
        short = D * itemsize <= 256 and (parts == 1 or kernel is _GRAD_KEY_VALUE)  # 16 rows fit in the memory
        return cls(held=2 if D <= 32 else 1, staged=16 if short else 8, parts=parts)

    @property
    def rows(self) -> int:
        """Rows that a threadgroup holds."""
        return 32 * self.held

    @property
    def threads(self) -> int:
        """Threads of a threadgroup."""
        return 128 * self.parts

    def template(self, dtype: mx.Dtype, D: int) -> dict[str, int | bool | mx.Dtype]:
        return {"T": dtype, "D": D, "HELD": self.held, "STAGED": self.staged, "PARTS": self.parts}


def _launch(kernel: MetalKernel, queries: mx.array, inputs: list[mx.array], outputs: list[Output]) -> list[mx.array]:
    """Launch one threadgroup per head and per tile of queries.

    The keys are not split. With the default batch size of 16, every preset launches more than `_FULL_GRID` threadgroups
    at its maximum length: the smallest grid has 192.
    """
    B, heads, T, D = queries.shape
    division = _Division.of(kernel, D, queries.itemsize)
    threads = division.threads
    grid = (-(-T // division.rows) * threads, heads, B)
    return kernel(inputs, division.template(queries.dtype, D), grid, (threads, 1, 1), outputs)


def _launch_grad_key_value(queries: mx.array, keys: mx.array, inputs: list[mx.array]) -> tuple[mx.array, mx.array]:
    """Launch one threadgroup per key head and per tile of keys, or several if those don't fill a GPU.

    Their results are summed in a fixed order.
    """
    (B, kv_heads, S, D), (_, heads, T, _) = keys.shape, queries.shape
    division = _Division.of(_GRAD_KEY_VALUE, D, keys.itemsize)
    tiles = -(-S // division.rows)
    staged_tiles = heads // kv_heads * -(-T // division.staged)
    splits = max(1, min(_FULL_GRID // (tiles * kv_heads * B), staged_tiles // _MIN_TILES))
    dtype = keys.dtype if splits == 1 else mx.float32
    template = {**division.template(keys.dtype, D), "U": dtype, "SPLITS": splits}
    grid, output = (tiles * division.threads, kv_heads * splits, B), ((splits, *keys.shape), dtype)
    key_grad, value_grad = _GRAD_KEY_VALUE(inputs, template, grid, (division.threads, 1, 1), [output, output])
    if splits == 1:
        return key_grad[0], value_grad[0]
    return key_grad.sum(axis=0).astype(keys.dtype), value_grad.sum(axis=0).astype(keys.dtype)
