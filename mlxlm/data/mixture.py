"""Rows of several sources, drawn by weight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from mlxlm.utils.errors import DataError

BLOCK = 1000  # rows; weights are kept to a thousandth


class Mixture:
    """Which source each row is of, as a function of (weights, seed) alone.

    Every BLOCK rows have the same number of each source's, as near to its weight as a thousandth is and at least one,
    in an order drawn by the seed. So shares don't drift from the weights as they would where each row is drawn for
    itself, and how many rows of a source came before any row is known without counting.

    Raises DataError for more sources than a block has rows.
    """

    def __init__(self, weights: Sequence[float], seed: int):
        if len(weights) > BLOCK:
            raise DataError(f"{len(weights)} sources with weights are too many", f"at most {BLOCK}")
        self.counts = _counts(np.asarray(weights, np.float64))
        self._seed = seed
        self._block = lru_cache(maxsize=2)(self._drawn)  # two: a batch may go on into the next

    def place(self, row: int) -> tuple[int, int]:
        """The source of row number `row`, and the number of the row among those of this source."""
        block, at = divmod(row, BLOCK)
        sources, numbers = self._block(block)
        source = int(sources[at])
        return source, block * int(self.counts[source]) + int(numbers[at])

    def rows_before(self, row: int) -> np.ndarray:
        """How many rows of each source come before row number `row`."""
        block, at = divmod(row, BLOCK)
        return block * self.counts + np.bincount(self._block(block)[0][:at], minlength=len(self.counts))

    def _drawn(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The source of each row of a block, and how many rows of the same come before it in the block."""
        sources = np.repeat(np.arange(len(self.counts)), self.counts)
        if len(self.counts) > 1:
            sources = np.random.default_rng([self._seed, block]).permutation(sources)
        numbers = np.empty(BLOCK, np.int64)
        for source, count in enumerate(self.counts):
            numbers[sources == source] = np.arange(count)
        return sources, numbers


def _counts(weights: np.ndarray) -> np.ndarray:
    """Rows of each source in a block: at least one, the others by largest remainder (Hamilton's method)."""
    wanted = np.maximum(0, BLOCK * weights / weights.sum() - 1)  # beyond the one that each has
    wanted *= (BLOCK - len(weights)) / max(wanted.sum(), 1e-300)
    counts = np.floor(wanted).astype(np.int64)
    missing = BLOCK - len(weights) - int(counts.sum())
    counts[np.argsort(counts - wanted, kind="stable")[:missing]] += 1
    return counts + 1
