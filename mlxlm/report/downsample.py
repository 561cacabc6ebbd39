"""Curves with fewer points that look the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Point = tuple[float, float]


def downsample(points: Iterable[Point], most: int) -> list[Point]:
    """At most `most` of the points, in their order: of each of equally many neighbours the lowest and the highest, so
    that no peak is lost, and the first and the last of all. Points that are not finite are left out."""
    known = [p for p in points if math.isfinite(p[0]) and math.isfinite(p[1])]
    if len(known) <= most:
        return known
    groups = max(1, (most - 2) // 2)
    found = [known[0]]
    inner = known[1:-1]
    for i in range(groups):
        group = inner[i * len(inner) // groups : (i + 1) * len(inner) // groups]
        if group:
            found += _ends(group)
    return [*found, known[-1]]


def _ends(group: Sequence[Point]) -> list[Point]:
    low = min(range(len(group)), key=lambda i: group[i][1])
    high = max(range(len(group)), key=lambda i: group[i][1])
    return [group[i] for i in sorted({low, high})]
