"""Smoothing and downsampling."""

import math

import pytest

from mlxlm.report.curves import ExponentialMovingAverage, downsample, smoothing_span


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
