"""Smoothing of noisy curves: one way for the terminal and the report."""

from __future__ import annotations


def smoothing_span(steps: int) -> int:
    """Over how many steps the loss of a run of so many is averaged: 2% of them, at least 5 and at most 500."""
    return max(5, min(500, steps // 50))


class ExponentialMovingAverage:
    """An exponential average over about `span` values; at the beginning over a fifth of those that there are, so that
    it is not late where a curve falls fastest."""

    def __init__(self, span: int):
        self._span, self._count, self._average = span, 0, 0.0

    def __call__(self, value: float) -> float:
        """Take the next value; returns the average."""
        self._average += (value - self._average) / min(self._span, 1 + self._count / 5)
        self._count += 1
        return self._average
