"""Costs of training attention on a GPU by path: matrix products, bytes moved, and bytes kept for the gradient.

Counts, not timings. They are of one sequence, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from mlxlm.kernels import flash_attention
from mlxlm.kernels.blockwise_attention import BLOCK_BYTES, blocks


class Cost(NamedTuple):
    """Counts of one sequence.

    Args:
        products: Multiply-adds of the matrix products.
        bytes_moved: Bytes read from and written to device memory.
        bytes_kept: Bytes kept from the forward to the backward pass, besides queries, keys and values.
    """

    products: int
    bytes_moved: int
    bytes_kept: int


@dataclass(frozen=True)
class Shape:
    """Sizes of training attention.

    Args:
        T: Number of queries and keys.
        D: Head dim.
        H: Number of query heads.
        K: Number of key heads.
        itemsize: Bytes per element: 2 or 4.
        window: Sliding window: a query sees the last `window` keys, including its own.
        text_length: Length of the texts that a document mask separates.
    """

    T: int
    D: int
    H: int
    K: int
    itemsize: int
    window: int | None = None
    text_length: int | None = None

    def keys_seen(self, rows: int) -> Iterator[int]:
        """Yield how many keys the queries of each tile of `rows` rows see together.

        By symmetry, these are also the queries that see a tile of keys.
        """
        window, text = self.window or self.T, self.text_length or self.T
        for start in range(0, self.T, rows):
            yield min(start + rows, self.T) - max(start - window + 1, start // text * text)


def unfused_cost(shape: Shape) -> Cost:
    """Return the cost of MLX's gradient on Metal, whose operations compute and store all T² scores of a head.

    The six products are two of the forward pass and four of the gradient. The other operations on scores, as
    `mx.compile` fuses them, are select, softmax, p · dp, its sum, and the gradient of softmax and select. All together
    read or write an array of scores 17 times, and the mask three times. The probabilities, the mask and the scaled
    queries are kept. Bytes are counted as if each operation read its inputs once, which is the least that it moves.
    """
    scores, row = shape.T**2, shape.T * shape.D * shape.itemsize
    moved = (17 * shape.itemsize * shape.H + 3) * scores + (12 * shape.H + 4 * shape.K) * row
    if shape.H > shape.K:  # gradients of keys and values are summed over the heads that share them
        moved += 2 * (shape.H + shape.K) * row
    kept = (shape.itemsize * shape.H + 1) * scores + shape.H * row
    return Cost(6 * shape.H * scores * shape.D, moved, kept)


def tiled_cost(shape: Shape) -> Cost:
    """Return the cost of the Metal kernels, which skip the tiles of scores that no query sees.

    The products are two of the forward pass, three of the gradient of the queries and four of that of keys and values.
    A threadgroup reads the rows that it holds, and all rows that these see. Bytes are counted as if threadgroups shared
    no cache, which is the most that they move, but without the sums over threadgroups that share keys in small grids.
    """
    T, H, K, row = shape.T, shape.H, shape.K, shape.T * shape.D * shape.itemsize
    products, staged = 0, 0  # staged: rows of a head that all threadgroups copy
    divisions = flash_attention.divisions(shape.D, shape.itemsize)
    for count, division in zip((2, 3, 4), divisions, strict=True):
        rows, columns = 8 * division.held, _round_up(shape.D, 16 * division.parts)
        step = 8 if count > 2 and division.parts == 1 else division.staged
        products += count * columns * rows * sum(_round_up(seen, step) for seen in shape.keys_seen(rows))
        staged += sum(min(T, _round_up(seen, division.staged)) for seen in shape.keys_seen(division.rows))
    statistics = sum(shape.keys_seen(divisions[2].rows))  # log-sum-exp and correction, float32
    moved = H * (2 * shape.D * shape.itemsize * staged + 8 * statistics + 6 * row) + 4 * K * row
    moved += 4 * T * (8 * H + 2 * K)  # statistics and ranges of the rows that are held
    return Cost(H * products, moved, H * (row + 4 * T))


def blockwise_cost(shape: Shape) -> Cost:
    """Return the cost of attention in blocks of queries with all keys up to their last one.

    A block has two products in the forward pass and five in the gradient. Texts save nothing. The output and the
    log-sum-exp are kept.
    """
    T, D, H, K, itemsize = shape.T, shape.D, shape.H, shape.K, shape.itemsize
    scores, keys = 0, 0
    for start, stop, first, end in blocks(T, T, H, shape.window, BLOCK_BYTES["gpu"]):
        scores, keys = scores + (stop - start) * (end - first), keys + end - first
    # Softmax and sums are float32, to which other dtypes are converted. The mask is computed once for all heads.
    score_bytes, key_bytes = (72, 52) if itemsize == 4 else (62, 50)
    moved = (H * score_bytes + 16) * scores + K * D * key_bytes * keys + (21 * H + 8 * K) * T * D * itemsize
    return Cost(7 * H * D * scores, moved, H * T * (D * itemsize + 4))


def tiling_pays(shape: Shape) -> bool:
    """Whether the tiled kernels do at most half of the products of MLX's gradient, and move no more bytes.

    Then they are no slower if they reach half of the throughput of MLX's products, whether products or memory limit the
    GPU. What they reach is not known.
    """
    tiled, unfused = tiled_cost(shape), unfused_cost(shape)
    return 2 * tiled.products <= unfused.products and tiled.bytes_moved <= unfused.bytes_moved


def _round_up(n: int, step: int) -> int:
    return -(-n // step) * step
