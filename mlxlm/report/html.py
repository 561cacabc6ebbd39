"""Self-contained HTML pages, readable without network and without scripts, with line charts as SVG.

The page's style sheet colors the charts. matplotlib's SVG takes 4.4 s and 133 kB for the page of a run of 50 steps;
these take 0.02 s and 37 kB, and `page.js` reads their points to show the values under the pointer.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from mlxlm.report.curves import Point, downsample
from mlxlm.utils.formatting import human_bytes, human_count, human_seconds

if TYPE_CHECKING:
    from jinja2 import Template

_HERE = Path(__file__).parent


def render_html(template: Path, script: str = "", **values: Any) -> str:
    """Render a template in the style of reports.

    It gets `style`, `script` and `script_hash`, for a content security policy that forbids everything else, and can
    import the macros of `table.html`. Every other text is escaped.

    Args:
        template: The file.
        script: JavaScript of the page.
        values: Variables of the template.
    """
    return _compiled(template).render(
        style=Markup((_HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **values,
    )


@cache
def _compiled(template: Path) -> Template:
    """Compile a template: nine tenths of the time that the page of a short run takes."""
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(
        loader=FileSystemLoader([template.parent, _HERE]),
        autoescape=True,
        finalize=_displayed,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template.name)


def _displayed(value: Any) -> Any:
    """Round floats to seven digits, and replace unprintable characters by U+FFFD."""
    if isinstance(value, Markup):
        return value
    text = f"{float(f'{value:.7g}')}" if isinstance(value, float) else str(value)
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 12, 10, 34
_ARROW_SPACING = 60  # for the value next to an arrow
NUM_COLORS = 8  # of the style sheet: .c0 to .c7


@dataclass(frozen=True)
class Series:
    """A curve.

    Attributes:
        name: For the readout under the pointer.
        points: (x, y).
        color: Index into the style sheet's colors; they repeat, dotted, after `NUM_COLORS`.
        style: "line", "faint" (for noise) or "dots" (for few values, joined by a line).
        label: Text next to the value, if there is only one.
    """

    name: str
    points: Sequence[Point]
    color: int = 0
    style: str = "line"
    label: str = ""


_Curves = list[tuple[Series, list[Point]]]  # with the points that are drawn


def chart(
    series: Sequence[Series],
    x_unit: str,
    y_unit: str = "",
    *,
    size: tuple[int, int] = (400, 240),
    max_points: int = 600,
    from_zero: bool = False,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Draw curves as an `<svg>`; "" if they have no points.

    The y axis is logarithmic if the values differ by more than a factor of 30 and all are positive. Otherwise, if the
    highest 2% of the values (of the first steps and of spikes) would take a third of the axis, it ends below them, and
    an arrow at the edge shows the highest. A curve of one point is a dot with its value.

    Args:
        series: The curves.
        x_unit: "tokens" or "seconds".
        y_unit: "tokens", "seconds", "bytes", or "" for plain numbers.
        size: Width and height.
        max_points: Points per curve; longer curves are downsampled.
        from_zero: Start the y axis at 0.
        marks: Vertical lines, (x, label).
    """
    curves = [(s, downsample(s.points, max_points)) for s in series]
    curves = [(s, points) for s, points in curves if points]
    return _Chart(curves, x_unit, y_unit, size, from_zero).svg(marks) if curves else ""


class _Chart:
    """One chart: its axes, and how it draws them and the curves."""

    def __init__(self, curves: _Curves, x_unit: str, y_unit: str, size: tuple[int, int], from_zero: bool):
        self.curves, self.x_unit, self.y_unit = curves, x_unit, y_unit
        self.width, self.height = size
        self.plot_width, self.plot_height = size[0] - _LEFT - _RIGHT, size[1] - _TOP - _BOTTOM
        xs = [x for _, points in curves for x, _ in points]
        self.x_low, high = min(xs), max(xs)
        # The ends differ also if adding one makes no difference in float64.
        self.x_high = max(high, self.x_low + 1, self.x_low * (1 + 1e-9))
        lowest = min(y for _, points in curves for _, y in points)
        visible = [points for s, points in curves if s.style != "faint" or len(curves) == 1]
        self.scale = _Scale.fit([y for points in visible for _, y in points], lowest, from_zero)

    def x(self, value: float) -> float:
        """Position in the plot area, in pixels from its left edge."""
        return (value - self.x_low) / (self.x_high - self.x_low) * self.plot_width

    def y(self, value: float) -> float:
        """Position in the plot area, in pixels from its top edge."""
        return (1 - self.scale.fraction(value)) * self.plot_height

    def svg(self, marks: Sequence[tuple[float, str]]) -> str:
        scale, right, bottom = self.scale, self.width - _RIGHT, self.height - _BOTTOM
        return "".join([
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" data-x="{self.x_low:.6g} {self.x_high:.6g}" '
            f'data-x-unit="{escape(self.x_unit)}" data-y="{scale.low:.6g} {scale.high:.6g}" '
            f'data-log="{int(scale.logarithmic)}" data-y-unit="{escape(self.y_unit)}" '
            f'data-plot="{_LEFT} {_TOP} {right} {bottom}">',
            *self._axes(right, bottom),
            *self._marks(marks, bottom),
            # The inner <svg> clips values beyond the axis; arrows show how high they are.
            f'<svg x="{_LEFT}" y="{_TOP}" width="{self.plot_width}" height="{self.plot_height}">',
            *self._curves(),
            *self._arrows(),
            "</svg></svg>",
        ])  # fmt: skip

    def _axes(self, right: int, bottom: int) -> Iterator[str]:
        for value in self.scale.ticks():
            y, label = _TOP + self.y(value), escape(format_value(value, self.y_unit))
            yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>'
            yield f'<text class="y" x="{_LEFT - 6}" y="{y + 4:.1f}">{label}</text>'
        for value in _ticks(self.x_low, self.x_high, 4 if self.width < 600 else 8):
            x, label = _LEFT + self.x(value), escape(format_value(value, self.x_unit))
            yield f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom}"/>'
            yield f'<text class="x" x="{x:.1f}" y="{bottom + 16}">{label}</text>'
        yield f'<text class="x" x="{(_LEFT + right) / 2:.0f}" y="{self.height - 4}">{_AXIS_LABELS[self.x_unit]}</text>'

    def _marks(self, marks: Sequence[tuple[float, str]], bottom: int) -> Iterator[str]:
        for value, label in marks:
            if self.x_low <= value <= self.x_high:
                line = f"M{_LEFT + self.x(value):.1f} {_TOP}V{bottom}"
                yield f'<path class="mark" d="{line}"><title>{escape(label)}</title></path>'

    def _curves(self) -> Iterator[str]:
        for series, points in self.curves:
            positions = [(self.x(x), self.y(y)) for x, y in points]
            line = " ".join(f"{x:.1f},{y:.1f}" for x, y in positions)
            classes = f"{_color(series)} {series.style}{' second' if series.color >= NUM_COLORS else ''}"
            yield f'<polyline class="{classes}" data-name="{escape(series.name)}" points="{line}"/>'
            if len(points) == 1:
                [(x, y)], value = positions, f"{series.label} {format_value(points[0][1], self.y_unit)}".strip()
                x = min(max(x, 4.0), self.plot_width - 4.0)
                yield f'<circle class="{classes}" cx="{x:.1f}" cy="{y:.1f}" r="4"/>'
                yield self._label(x, max(y - 8, 12), value)
            elif series.style == "dots" and len(points) <= 60:
                for x, y in positions:
                    yield f'<circle class="{classes}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>'

    def _arrows(self) -> Iterator[str]:
        """An arrow at the top edge, with the highest value, for each group of points above it."""
        above = [(self.x(x), y, s) for s, p in self.curves for x, y in p if self.scale.fraction(y) > 1 + 1e-9]
        groups: list[list[tuple[float, float, Series]]] = []
        for point in sorted(above, key=lambda p: p[0]):
            if not groups or point[0] - groups[-1][-1][0] >= _ARROW_SPACING:
                groups.append([])
            groups[-1].append(point)
        for group in groups:
            x, highest, series = max(group, key=lambda p: p[1])
            x = min(max(x, 5.0), self.plot_width - 5.0)
            value = format_value(highest, self.y_unit)
            title = f"<title>{escape(series.name)}: up to {escape(value)}, above the chart</title>"
            yield f'<path class="beyond {_color(series)}" d="M{x:.1f} 1l5 8h-10z">{title}</path>'
            yield self._label(x, 10, value)

    def _label(self, x: float, y: float, text: str) -> str:
        """A text next to a point, on the side with more room."""
        side, x = ("before", x - 8) if x > self.plot_width / 2 else ("value", x + 8)
        return f'<text class="{side}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def _color(series: Series) -> str:
    """The color's class in the style sheet."""
    return f"c{series.color % NUM_COLORS}"


def single_values(series: Sequence[Series], x_unit: str, y_unit: str = "") -> list[str]:
    """Each curve as a line of text, if none has more than one point; otherwise [], and `chart` draws them."""
    curves = [(s.name, points) for s in series if (points := downsample(s.points, 2))]
    if any(len(points) > 1 for _, points in curves):
        return []
    suffix = " tokens" if x_unit == "tokens" else " of steps"
    return [f"{name}: {format_value(y, y_unit)} at {format_value(x, x_unit)}{suffix}" for name, [(x, y)] in curves]


_AXIS_LABELS = {"tokens": "tokens", "seconds": "time spent in steps"}


def format_value(value: float, unit: str) -> str:
    """Format a number for people."""
    if unit == "bytes":
        return human_bytes(value)
    if unit == "seconds":
        return human_seconds(value) if value >= 10 else f"{value:.3g}s"
    if unit == "tokens" or abs(value) >= 1000:
        return human_count(value)
    return f"{value:.4g}"


_MAX_OUTLIER_RANGE = 1.5  # of the highest 2%, relative to the range of the other values


@dataclass(frozen=True)
class _Scale:
    """The y axis."""

    low: float
    high: float
    logarithmic: bool

    @classmethod
    def fit(cls, values: Sequence[float], lowest: float, from_zero: bool) -> _Scale:
        """The axis for `values`; it also includes `lowest`, the lowest value of all curves."""
        values = sorted(values)
        low, high = values[0], values[-1]
        if not from_zero and lowest > 0 and high > 30 * low:
            return cls(lowest, high, True)
        low = min(0.0, lowest) if from_zero else lowest
        quantile = values[math.ceil(0.98 * (len(values) - 1))]
        if not from_zero and high - low > _MAX_OUTLIER_RANGE * (quantile - low):
            high = quantile
        margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
        return cls(low if from_zero else low - margin, high + margin, False)

    def fraction(self, y: float) -> float:
        """0 at the lower end of the axis, 1 at the upper; values outside are clamped to [-2, 3]."""
        fraction = (y - self.low) / (self.high - self.low)
        if self.logarithmic:
            fraction = math.log(max(y, self.low / 10) / self.low) / math.log(self.high / self.low)
        return max(-2.0, min(3.0, fraction))

    def ticks(self) -> list[float]:
        if not self.logarithmic:
            return _ticks(self.low, self.high, 5)
        decades = [10.0**p for p in range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)]
        powers = [tick for tick in decades if self.low <= tick <= self.high]
        if len(powers) >= 3:
            return powers[:12]
        return [f * power for power in decades for f in (1, 2, 5) if self.low <= f * power <= self.high]


def _ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from `low` to `high`."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * f for f in (1, 2, 2.5, 5, 10) if power * f >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    n = math.floor(high / step + 1e-9) - first + 1
    return [0.0 if i + first == 0 else (i + first) * step for i in range(min(n, 3 * count))]
