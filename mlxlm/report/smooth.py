"""Smoothing of noisy curves: one way for the terminal and the report."""

from __future__ import annotations


def span_of(steps: int) -> int:
    """Over how many steps the loss of a run of so many is averaged: 2% of them, at least 5 and at most 500."""
    return max(5, min(500, steps // 50))


class Smoothed:
    """An exponential average over about `span` values; the first ones are weighed as if nothing came before them
    (Kingma & Ba 2015, section 3)."""

    def __init__(self, span: int):
        self._decay, self._sum, self._weight = 1 - 1 / span, 0.0, 0.0

    def __call__(self, value: float) -> float:
        """Take the next value; returns the average."""
        self._sum = self._decay * self._sum + (1 - self._decay) * value
        self._weight = self._decay * self._weight + 1 - self._decay
        return self._sum / self._weight
