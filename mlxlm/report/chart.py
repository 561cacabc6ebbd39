"""Line charts as SVG: readable without a script, coloured by the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from mlxlm.report.downsample import Point, downsample
from mlxlm.utils.formatting import human_bytes, human_count, human_seconds

_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 34
NUM_COLORS = 8  # of the style sheet: .c0 to .c7


@dataclass(frozen=True)
class Series:
    """A curve. `style`: "line", "faint" for what noise surrounds, "dots" for few values, with a line between them.
    `label`: what a single value is called in the picture, where there is no more than one."""

    name: str
    points: Sequence[Point]
    color: int = 0
    style: str = "line"
    label: str = ""


def chart(
    series: Sequence[Series],
    x_unit: str,
    y_unit: str = "",
    *,
    size: tuple[int, int] = (400, 240),
    points: int = 600,
    from_zero: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """An `<svg>` of the series, each of at most `points` points; "" without any point.

    The y axis is logarithmic where values of a curve are more than 30 times apart and none is below 0. Else, where the
    highest 2% of the values, those of the first steps and of spikes, would take a third of it, it ends below them, and
    an arrow at the edge has the highest. A series of one point is a dot with its value. `x_unit` and `y_unit`:
    "tokens", "seconds", "bytes", or another, for the figures at the axes. `marks` are vertical lines at x with a label.
    """
    drawn = [(s, downsample(s.points, points)) for s in series]
    drawn = [(s, p) for s, p in drawn if p]
    if not drawn:
        return ""
    width, height = size
    every_x = [x for _, p in drawn for x, _ in p]
    x_low, x_high = min(every_x), max(every_x)
    x_high = max(x_high, x_low + 1, x_low * (1 + 1e-9))  # apart also where one more is the same in float64
    clear = [p for s, p in drawn if s.style != "faint" or len(drawn) == 1]
    lowest = min(y for _, p in drawn for _, y in p)
    scale = _Scale.of([y for p in clear for _, y in p], lowest, from_zero)

    def across(x: float) -> float:
        return _LEFT + (x - x_low) / (x_high - x_low) * (width - _LEFT - _RIGHT)

    def down(y: float) -> float:
        return _TOP + (1 - scale.share(y)) * (height - _TOP - _BOTTOM)

    parts = [
        f'<svg viewBox="0 0 {width} {height}" role="img" data-x="{x_low:.6g} {x_high:.6g}" '
        f'data-x-unit="{escape(x_unit)}" '
        f'data-y="{scale.low:.6g} {scale.high:.6g}" data-log="{int(scale.logarithmic)}" data-y-unit="{escape(y_unit)}" '
        f'data-plot="{_LEFT} {_TOP} {width - _RIGHT} {height - _BOTTOM}">'
    ]
    for y in scale.ticks():
        at = down(y)
        parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{width - _RIGHT}"/>')
        parts.append(f'<text class="y" x="{_LEFT - 6}" y="{at + 4:.1f}">{escape(format_value(y, y_unit))}</text>')
    for x in _ticks(x_low, x_high, 4 if width < 600 else 8):
        at = across(x)
        parts.append(f'<path class="grid" d="M{at:.1f} {_TOP}V{height - _BOTTOM}"/>')
        parts.append(
            f'<text class="x" x="{at:.1f}" y="{height - _BOTTOM + 16}">{escape(format_value(x, x_unit))}</text>'
        )
    parts.append(f'<text class="x" x="{(_LEFT + width - _RIGHT) / 2:.0f}" y="{height - 4}">{_NAMES[x_unit]}</text>')
    for x, label in marks:
        if x_low <= x <= x_high:
            at = across(x)
            parts.append(
                f'<path class="mark" d="M{at:.1f} {_TOP}V{height - _BOTTOM}"><title>{escape(label)}</title></path>'
            )
    # What is beyond the axis leaves the picture at its edge, where `_arrows` say how far.
    parts.append(f'<svg x="{_LEFT}" y="{_TOP}" width="{width - _LEFT - _RIGHT}" height="{height - _TOP - _BOTTOM}">')
    for s, p in drawn:
        places = [(across(x) - _LEFT, down(y) - _TOP) for x, y in p]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        look = _look(s)
        parts.append(f'<polyline class="{look}" data-name="{escape(s.name)}" points="{line}"/>')
        if len(p) == 1:
            [(a, b)], value = places, f"{s.label} {format_value(p[0][1], y_unit)}".strip()
            a = min(max(a, 4.0), width - _LEFT - _RIGHT - 4.0)
            parts.append(f'<circle class="{look}" cx="{a:.1f}" cy="{b:.1f}" r="4"/>')
            parts.append(_beside(a, max(b - 8, 12), value, width - _LEFT - _RIGHT))
        elif s.style == "dots" and len(p) <= 60:
            parts += [f'<circle class="{look}" cx="{a:.1f}" cy="{b:.1f}" r="2.5"/>' for a, b in places]
    points_above = [(across(x) - _LEFT, y, s) for s, p in drawn for x, y in p if scale.share(y) > 1 + 1e-9]
    parts += _arrows(points_above, y_unit, width - _LEFT - _RIGHT)
    return "".join([*parts, "</svg></svg>"])


def _look(series: Series) -> str:
    """Its classes in the style sheet."""
    return f"c{series.color % NUM_COLORS} {series.style}{' second' if series.color >= NUM_COLORS else ''}"


def _arrows(points: Sequence[tuple[float, float, Series]], unit: str, width: int) -> list[str]:
    """An arrow at the upper edge, with the value, for each group of (x, value, series) beyond it: the highest."""
    parts, groups = [], []
    for point in sorted(points, key=lambda p: p[0]):
        if groups and point[0] - groups[-1][-1][0] < _ARROW_ROOM:
            groups[-1].append(point)
        else:
            groups.append([point])
    for group in groups:
        x, y, series = max(group, key=lambda p: p[1])
        x = min(max(x, 5.0), width - 5.0)
        value = format_value(y, unit)
        title = f"<title>{escape(series.name)}: up to {escape(value)}, above the picture</title>"
        parts.append(f'<path class="beyond c{series.color % NUM_COLORS}" d="M{x:.1f} 1l5 8h-10z">{title}</path>')
        parts.append(_beside(x, 10, value, width))
    return parts


_ARROW_ROOM = 60  # between two arrows, for the value


def _beside(x: float, y: float, text: str, width: int) -> str:
    """A text at a point, on the side of it that has more room."""
    side, at = ("before", x - 8) if x > width / 2 else ("value", x + 8)
    return f'<text class="{side}" x="{at:.1f}" y="{y:.1f}">{escape(text)}</text>'


def single_values(series: Sequence[Series], x_unit: str, y_unit: str = "") -> list[str]:
    """What there is to say of series of which none has more than one point: a line of text each. [] where one has, and
    `chart` draws them."""
    found = [(s, downsample(s.points, 2)) for s in series]
    if any(len(p) > 1 for _, p in found):
        return []
    return [f"{s.name}: {format_value(p[0][1], y_unit)} at {_amount(p[0][0], x_unit)}" for s, p in found if p]


def _amount(value: float, unit: str) -> str:
    return f"{format_value(value, unit)} tokens" if unit == "tokens" else f"{format_value(value, unit)} of steps"


_NAMES = {"tokens": "tokens", "seconds": "time spent in steps"}


def format_value(value: float, unit: str) -> str:
    """A number as people read it."""
    if unit == "bytes":
        return human_bytes(value)
    if unit == "seconds":
        return human_seconds(value) if value >= 10 else f"{value:.3g}s"
    if unit == "tokens" or abs(value) >= 1000:
        return human_count(value)
    return f"{value:.4g}"


_ROOM_ABOVE = 1.5  # heights of the other values that an axis may have for the highest 2%


@dataclass(frozen=True)
class _Scale:
    low: float
    high: float
    logarithmic: bool

    @classmethod
    def of(cls, values: Sequence[float], lowest: float, from_zero: bool) -> _Scale:
        """`values` decide, but for the lowest of all, which the axis has in any case."""
        values = sorted(values)
        low, high = values[0], values[-1]
        if not from_zero and lowest > 0 and high > 30 * low:
            return cls(lowest, high, True)
        if from_zero:
            low = min(0.0, lowest)
        else:
            low = lowest
            most = values[math.ceil(0.98 * (len(values) - 1))]
            high = high if high - low <= _ROOM_ABOVE * (most - low) else most
        margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
        return cls(low if from_zero else low - margin, high + margin, False)

    def share(self, y: float) -> float:
        """0 at the lower end of the axis, 1 at the upper; beyond that at most 2 heights away."""
        if self.logarithmic:
            y = max(y, self.low / 10)
            share = math.log(y / self.low) / math.log(self.high / self.low)
        else:
            share = (y - self.low) / (self.high - self.low)
        return max(-2.0, min(3.0, share))

    def ticks(self) -> list[float]:
        if self.logarithmic:
            powers = range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
            return [10.0**p for p in powers][:12] or [self.low, self.high]
        return _ticks(self.low, self.high, 5)


def _ticks(low: float, high: float, most: int) -> list[float]:
    """At most about `most` round numbers between the two."""
    raw = (high - low) / most
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * f for f in (1, 2, 2.5, 5, 10) if power * f >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [0.0 if i + first == 0 else (i + first) * step for i in range(min(count, 3 * most))]
