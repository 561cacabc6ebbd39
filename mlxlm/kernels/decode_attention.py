"""Metal decode attention: few queries over a long key-value cache, plain or quantized."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

from mlxlm.backend.mlx import mx
from mlxlm.kernels.metal import MetalKernel, scalar

HEAD_DIMS = (32, 48, 64, 80, 96, 112, 128, 256)
MAX_QUERIES = 8
MAX_ROWS = 64  # queries · heads per key head that fit in the registers of one threadgroup

_OPTIONS = ("scale", "cap", "window", "slopes", "sinks", "range")
_QUANTIZED = ("keys", "key_scales", "key_biases", "values", "value_scales", "value_biases")
_kernel = partial(MetalKernel, outputs=("out",), contiguous=False, headers=("common.h", "attention_decode.h"))
_DENSE_KERNEL = _kernel("attention_decode", ("queries", "keys", "values", *_OPTIONS))
_QUANTIZED_KERNEL = _kernel("attention_decode_quantized", ("queries", *_QUANTIZED, *_OPTIONS))
_COMBINE_KERNEL = MetalKernel("attention_decode_combine", inputs=("parts",), outputs=("out",))

_SIMD = 32  # threads of a SIMD group
_SIMDGROUPS = 8  # per threadgroup
_TILE_BYTES = 16384  # threadgroup memory for tiles of keys and values: half of Metal's limit
_THREADGROUPS = 128  # target number on the GPU: about three per core of a large GPU (40 cores)
# Splits may add at most 1/6 to the memory traffic of the keys and values: 64 threadgroups for 64 heads, 8 key heads and
# 1,024 keys of head dim 128 in half precision.
_SPLIT_SHARE = 6
_NO_WINDOW = 1 << 30  # a window of this length sees all keys
_CONSTANT_SIZE = 8  # MLX puts inputs with fewer elements in Metal's constant address space


def _in_device_memory(x: mx.array) -> mx.array:
    """Pad a tiny array with unused batch entries: as a constant, it would need another kernel variant."""
    if x.size >= _CONSTANT_SIZE:
        return x
    return mx.pad(x, [(0, _CONSTANT_SIZE), (0, 0), (0, 0), (0, 0)])


@dataclass(frozen=True)
class _Division:
    """How a threadgroup divides queries and keys among its SIMD groups.

    Args:
        row_groups: Number of groups of query rows.
        key_groups: Number of groups of keys.
        step: Keys that a SIMD group processes at once.
        tile: Keys in threadgroup memory; 0 reads them directly from device memory.
    """

    row_groups: int
    key_groups: int
    step: int
    tile: int

    @classmethod
    def of(cls, rows: int, head_dim: int, itemsize: int) -> _Division:
        """Choose the division for a number of query rows.

        A SIMD group keeps up to 8 rows in registers (4 for head dim 256): 64 registers for queries and sums, of
        Apple's 128. With more rows, row groups share tiles of the keys in threadgroup memory. There are at most 8 row
        groups, since 16 with this many registers don't fit in a threadgroup; so more than 32 rows of head dim 256
        spill.
        """
        row_groups = min(_SIMDGROUPS, -(-rows // (8 if head_dim <= 128 else 4)))
        rows_per_group = -(-rows // row_groups)
        step = _SIMD >> (rows_per_group - 1).bit_length()
        if row_groups == 1:
            return cls(1, _SIMDGROUPS, step, 0)
        capacity = _TILE_BYTES // (2 * head_dim * itemsize)
        key_groups = max(1, min(_SIMDGROUPS // row_groups, capacity // step))
        run = key_groups * step
        return cls(row_groups, key_groups, step, capacity // run * run)


def _splits(visible: int, kv_heads: int, rows: int, head_dim: int, itemsize: int, row_bytes: int, run: int) -> int:
    """Return how many threadgroups share the visible keys of a head: enough to fill the GPU, if that is cheap.

    A split reads the queries again, and writes and reads a partial result in float32. All splits together may cost at
    most 1/6 of the bytes of the keys and values. A split has at least the keys that a threadgroup processes at once.
    """
    target = -(-_THREADGROUPS // kv_heads)
    split_bytes = rows * (head_dim * itemsize + 8 * (head_dim + 2) + 4)
    min_keys = max(run, -(-_SPLIT_SHARE * split_bytes // row_bytes))
    return max(1, min(target, visible // min_keys))


@cache
def _unused() -> tuple[mx.array, mx.array]:
    """Return slopes (or sinks) and ranges that no kernel reads. As data, not operations: see `scalar`."""
    return mx.array([0.0], mx.float32), mx.array([[0, 0]], mx.int32)


def decode_attention(
    queries: mx.array,
    keys: mx.array | tuple[mx.array, ...],
    values: mx.array | tuple[mx.array, ...],
    scale: float,
    *,
    window: int | None = None,
    softcap: float | None = None,
    slopes: mx.array | None = None,
    sinks: mx.array | None = None,
    ranges: mx.array | None = None,
    group_size: int = 0,
    key_bits: int = 0,
    value_bits: int = 0,
) -> mx.array:
    """Compute attention of the last T <= 8 positions in one pass over the visible keys, in float32.

    Query t has position p = S - T + t and sees the keys s <= p, with a `window` only those > p - window. Scores are
    scale · q · k, then softcap · tanh(score / softcap), then ALiBi's slopes[h] · (s - p) is added. The keys are split
    over threadgroups, whose results a second kernel combines (Flash-Decoding, Dao et al. 2023): see `_splits`.
    The arguments are not checked.

    Args:
        queries: `[B, H, T, D]`, float32, float16 or bfloat16, with any strides. D in HEAD_DIMS, T · H / H_kv <= 64.
        keys: `[B, H_kv, S, D]` in the same dtype, with any strides (such as a slice of a cache buffer) that place
            neighboring keys less than 2²⁴ elements apart. With `key_bits`, the result of `mx.quantize`, which is
            dequantized in registers: packed uint32 `[B, H_kv, S, D · bits / 32]`, scales and biases
            `[B, H_kv, S, D / group_size]` in the queries' dtype.
        values: As the keys.
        scale: Multiplies the scores.
        window: Sliding window in tokens.
        softcap: Soft cap of the scores.
        slopes: ALiBi slopes, float32 `[H]`.
        sinks: Attention sinks, `[H]`.
        ranges: int32 `[B, 2]`: the first key of each batch entry, and the one after its last, which takes the place of
            S. A later window begins later.
        group_size: 32 or 64, a divisor of D, if keys and values are quantized.
        key_bits: 4 or 8 if they are quantized, else 0.
        value_bits: The same as `key_bits`.

    Returns:
        `[B, H, T, D]`; 0 for a query that sees no key.
    """
    B, heads, T, D = queries.shape
    if key_bits:
        kernel, arrays = _QUANTIZED_KERNEL, [_in_device_memory(x) for x in (*keys, *values)]
        template = {"GROUP": group_size, "BITS": key_bits}
        row_bytes = 2 * (D * key_bits // 8 + 2 * D // group_size * queries.itemsize)
    else:
        kernel, arrays, template, row_bytes = _DENSE_KERNEL, [keys, values], {}, 2 * D * queries.itemsize
    kv_heads, S = arrays[0].shape[1:3]
    grouped = heads // kv_heads
    rows = grouped * T
    division = _Division.of(rows, D, queries.itemsize)
    windowed = window is not None
    window = 0 if window is None else min(window, _NO_WINDOW)
    visible = min(S, window + T - 1) if windowed else S  # keys that any query sees
    run = division.key_groups * division.step
    splits = _splits(visible, B * kv_heads, rows, D, queries.itemsize, row_bytes, run)
    out_type = mx.float32 if splits > 1 else queries.dtype
    threads = _SIMD * division.row_groups * division.key_groups
    no_slopes, no_ranges = _unused()
    inputs = [
        scalar(scale, mx.float32),
        scalar(softcap or 0.0, mx.float32),
        scalar(window, mx.int32),
        no_slopes if slopes is None else slopes,
        no_slopes if sinks is None else sinks,
        no_ranges if ranges is None else ranges,
    ]
    (out,) = kernel(
        inputs=[queries, *arrays, *inputs],
        template={
            "T": queries.dtype,
            "D": D,
            "GROUPED": grouped,
            "QUERIES": T,
            "ROW_GROUPS": division.row_groups,
            "KEY_GROUPS": division.key_groups,
            "TILE": division.tile,
            "SPLIT": splits > 1,
            "WINDOW": windowed,
            "SOFTCAP": softcap is not None,
            "SLOPES": slopes is not None,
            "SINKS": sinks is not None,
            "RANGE": ranges is not None,
            **template,
        },
        grid=(threads, B * kv_heads, splits),
        threadgroup=(threads, 1, 1),
        outputs=[((B * heads * T, splits, D + 2) if splits > 1 else queries.shape, out_type)],
    )
    if splits == 1:
        return out
    (out,) = _COMBINE_KERNEL(
        inputs=[out],
        template={"T": queries.dtype, "D": D},
        grid=(_SIMD, B * heads * T, 1),
        threadgroup=(_SIMD, 1, 1),
        outputs=[(queries.shape, queries.dtype)],
    )
    return out
