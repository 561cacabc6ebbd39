"""Estimates with 95 % confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_Z = 1.959964  # 97.5 % quantile of the normal distribution
_RESAMPLES = 1000


@dataclass(frozen=True)
class Estimate:
    """A measured value, and the ends of its 95 % confidence interval."""

    value: float
    low: float
    high: float


def wilson(successes: int, trials: int) -> Estimate:
    """The share of successes, with the interval of Wilson (1927), which is also right near 0 and 1."""
    share, z2 = successes / trials, _Z * _Z / trials
    center = (share + z2 / 2) / (1 + z2)
    half = _Z / (1 + z2) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials))
    return Estimate(share, min(share, max(0.0, center - half)), max(share, min(1.0, center + half)))  # despite rounding


def bootstrap(sums: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray]) -> Estimate:
    """A statistic of sums over independent units, with the percentile interval of the bootstrap (Efron 1979).

    Args:
        sums: float64 `[units, ...]`, such as the losses of windows of text.
        statistic: Computes it from the sums over all units, `[..., ]` with any number of axes in front.
    """
    rng = np.random.default_rng(0)
    weights = rng.multinomial(len(sums), np.full(len(sums), 1 / len(sums)), size=_RESAMPLES)
    resampled = np.tensordot(weights.astype(np.float64), sums, axes=1)
    with np.errstate(invalid="ignore"):  # 0 / 0 in resamples without a prediction: they don't count
        low, high = np.nanquantile(statistic(resampled), (0.025, 0.975))
    return Estimate(float(statistic(sums.sum(axis=0))), float(low), float(high))
