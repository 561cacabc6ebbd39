"""Smoothing and thinning of curves, for the report, the pictures and the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Point = tuple[float, float]


def smoothing_span(steps: int) -> int:
    """Steps over which the loss of a run of `steps` steps is averaged: 2% of them, from 5 to 500."""
    return max(5, min(500, steps // 50))


class ExponentialMovingAverage:
    """An exponential moving average over about `span` values.

    While there are few values, it averages over a fifth of them, so that it doesn't lag where a curve falls fastest.
    """

    def __init__(self, span: int):
        self._span, self._count, self._average = span, 0, 0.0

    def __call__(self, value: float) -> float:
        """Add a value and return the average."""
        self._average += (value - self._average) / min(self._span, 1 + self._count / 5)
        self._count += 1
        return self._average


def block_means(points: Sequence[Point], max_points: int) -> list[Point]:
    """At most `max_points` points, each the mean y of equally many neighbors at the x of the last one."""
    size = max(1, -(-len(points) // max_points))
    blocks = [points[i : i + size] for i in range(0, len(points), size)]
    return [(block[-1][0], sum(y for _, y in block) / len(block)) for block in blocks]


def downsample(points: Iterable[Point], max_points: int) -> list[Point]:
    """At most `max_points` of the points, in order: the lowest and highest of each of equally many neighbors.

    So no peak is lost. The first and last points stay; points that are not finite are left out.
    """
    finite = [p for p in points if math.isfinite(p[0]) and math.isfinite(p[1])]
    if len(finite) <= max_points:
        return finite
    groups = max(1, (max_points - 2) // 2)
    sampled = [finite[0]]
    inner = finite[1:-1]
    for i in range(groups):
        group = inner[i * len(inner) // groups : (i + 1) * len(inner) // groups]
        if group:
            ends = {pick(range(len(group)), key=lambda i: group[i][1]) for pick in (min, max)}  # noqa: B023
            sampled += [group[i] for i in sorted(ends)]
    return [*sampled, finite[-1]]
