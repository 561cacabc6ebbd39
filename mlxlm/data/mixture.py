"""Draws training rows from several sources by weight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from mlxlm.utils.errors import DataError

BLOCK_ROWS = 1000


class Mixture:
    """Maps each row to a source, as a function of the weights and the seed alone.

    Every block of 1000 rows has the same number of rows of each source, as close to its weight as a thousandth and at
    least one, in an order drawn by the seed. So the shares don't drift from the weights, as they would if each row were
    drawn independently, and how many rows of a source precede any row is known without counting.

    Raises:
        DataError: There are more sources than rows in a block.
    """

    def __init__(self, weights: Sequence[float], seed: int):
        if len(weights) > BLOCK_ROWS:
            raise DataError(f"{len(weights)} sources with weights are too many", f"at most {BLOCK_ROWS}")
        self.counts = _rows_per_block(np.asarray(weights, np.float64))
        self._seed = seed
        self._block = lru_cache(maxsize=2)(self._draw_block)  # two: a batch can span two blocks

    def locate(self, row: int) -> tuple[int, int]:
        """The source of a row, and the row's number among the rows of that source."""
        block, i = divmod(row, BLOCK_ROWS)
        sources, numbers = self._block(block)
        source = int(sources[i])
        return source, block * int(self.counts[source]) + int(numbers[i])

    def rows_before(self, row: int) -> np.ndarray:
        """How many rows of each source precede a row."""
        block, i = divmod(row, BLOCK_ROWS)
        return block * self.counts + np.bincount(self._block(block)[0][:i], minlength=len(self.counts))

    def _draw_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The source of each row of a block, and how many rows of that source precede it in the block."""
        sources = np.repeat(np.arange(len(self.counts)), self.counts)
        if len(self.counts) > 1:
            sources = np.random.default_rng([self._seed, block]).permutation(sources)
        numbers = np.empty(BLOCK_ROWS, np.int64)
        for source, count in enumerate(self.counts):
            numbers[sources == source] = np.arange(count)
        return sources, numbers


def _rows_per_block(weights: np.ndarray) -> np.ndarray:
    """Rows of each source in a block: one each, the others by the largest remainder method (Hamilton)."""
    quota = np.maximum(0, BLOCK_ROWS * weights / weights.sum() - 1)
    quota *= (BLOCK_ROWS - len(weights)) / max(quota.sum(), 1e-300)
    counts = np.floor(quota).astype(np.int64)
    missing = BLOCK_ROWS - len(weights) - int(counts.sum())
    counts[np.argsort(counts - quota, kind="stable")[:missing]] += 1
    return counts + 1
