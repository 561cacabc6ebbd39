"""Charts: where things are drawn, axes, arrows for values above the chart."""

import math
import re
from xml.etree import ElementTree

import pytest

from mlxlm.report.curves import ExponentialMovingAverage, downsample, smoothing_span
from mlxlm.report.html import Series, chart, format_value


@pytest.mark.parametrize("x", [0.0, 5.0, 2.0**53, 1e30, 9e299])
def test_a_chart_of_one_point(x):
    assert "<polyline" in chart([Series("a", [(x, 1.0)])], "tokens")


def test_points_are_drawn_at_their_values():
    svg = chart([Series("a", [(0.0, 1.0), (10.0, 3.0)])], "tokens", size=(400, 240), marks=[(5.0, "<here>")])
    root = ElementTree.fromstring(svg)
    left, top, right, bottom = map(float, root.get("data-plot").split())
    low, high = map(float, root.get("data-y").split())
    assert low < 1 < 3 < high
    [points] = [e.get("points") for e in root.iter() if e.tag == "polyline"]
    (x0, y0), (x1, y1) = (map(float, p.split(",")) for p in points.split())
    assert (x0, x1) == (0, right - left)
    for y, value in ((y0, 1.0), (y1, 3.0)):
        assert high - y / (bottom - top) * (high - low) == pytest.approx(value, abs=0.02)
    assert [e.text for e in root.iter("title")] == ["<here>"]
    assert chart([Series("a", [(1.0, math.nan)])], "tokens") == ""


def test_logarithmic_axis_and_axis_of_a_constant():
    assert 'data-log="1"' in chart([Series("a", [(1.0, 0.01), (2.0, 50.0)])], "tokens")
    assert 'data-log="0"' in chart([Series("a", [(1.0, 0.0), (2.0, 50.0)])], "tokens")
    for value in (0.0, 5.0, -3.0, 1e-12, 1e12):
        ElementTree.fromstring(chart([Series("a", [(1.0, value), (1.0, value)])], "seconds", "bytes"))


def arrows(picture):
    """(x, title) of each mark for values above the chart."""
    found = re.findall(r'<path class="beyond c\d" d="M([\d.]+) 1[^"]*"><title>([^<]*)</title>', picture)
    return [(float(x), title) for x, title in found]


def test_arrows_show_values_above_the_chart():
    """A spike of one step, of which the smoothed curve shows little; also the first steps, where they are far off."""
    steady = [(float(i), 2.0 + 0.1 * (i % 2)) for i in range(1000)]
    noisy = [(x, y + (40.0 if x == 700 else 30.0 if x == 702 else 0.0)) for x, y in steady]
    runs = [Series("a each step", noisy, 0, "faint"), Series("a smoothed", steady, 0)]
    picture = chart(runs, "tokens", size=(1160, 330))
    [(x, title)] = arrows(picture)
    assert title == "a each step: up to 42, above the chart" and ">42</text>" in picture
    assert x == pytest.approx((1160 - 52 - 12) * 700 / 999, abs=0.1)
    assert arrows(chart([Series("a", [(i, 2.0 + i / 1000) for i in range(1000)])], "tokens")) == []
    first = chart([Series("a", [(i, 30.0 if i == 0 else y) for i, y in steady])], "tokens")
    assert [t for _, t in arrows(first)] == ["a: up to 30, above the chart"]


def test_noise_stays_within_the_chart():
    points = [(float(i), 2.0 + (-0.9 if i == 50 else 0.0)) for i in range(100)]
    picture = chart([Series("each", points, 0, "faint"), Series("smoothed", [(0.0, 2.0), (99.0, 2.2)])], "tokens")
    low, _ = map(float, re.search(r'data-y="(\S+) (\S+)"', picture).groups())
    assert low < 1.1


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [(1.5e9, "bytes", "1.5 GB"), (75, "seconds", "1m15s"), (0.25, "seconds", "0.25s"), (2e6, "tokens", "2M"),
     (0.00061, "", "0.00061"), (52000.0, "", "52k")],
)  # fmt: skip
def test_format_value(value, unit, expected):
    assert format_value(value, unit) == expected


def test_downsample_keeps_ends_and_peaks():
    points = [(float(i), 100.0 if i == 777 else -50.0 if i == 4321 else math.sin(i)) for i in range(10_000)]
    found = downsample(points, 200)
    assert len(found) <= 200 and found[0] == points[0] and found[-1] == points[-1]
    assert found == sorted(found) and (777.0, 100.0) in found and (4321.0, -50.0) in found
    assert downsample(points[:7] + [(7.0, math.inf)], 7) == points[:7] and downsample([], 5) == []


def test_smoothing():
    smooth = ExponentialMovingAverage(10)
    assert smooth(3.0) == 3.0
    assert [smooth(3.0) for _ in range(50)] == pytest.approx([3.0] * 50)
    assert smooth(13.0) == pytest.approx(4.0)  # a tenth of the way
    assert (smoothing_span(0), smoothing_span(5000), smoothing_span(10**9)) == (5, 100, 500)
