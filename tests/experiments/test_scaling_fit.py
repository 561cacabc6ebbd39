"""Fits of scaling laws recover known laws."""

import math
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.experiments.scaling_analysis import FILE, analyze, fit_warnings, hold_out_largest, read_law
from mlxlm.experiments.scaling_fit import ScalingPoint, fit_joint, fit_power
from mlxlm.plan.scaling_law import CHINCHILLA_LAW as CHINCHILLA
from mlxlm.plan.scaling_law import PowerLaw, ScalingLaw
from mlxlm.utils.errors import ConfigError, DataError
from mlxlm.utils.json_files import write_json
from tests.experiments.scaling_points import scaling_points

POINTS = scaling_points(CHINCHILLA)


def test_fit_joint_recovers_chinchilla():
    fitted = fit_joint(scaling_points(CHINCHILLA), resamples=0)
    assert astuple(fitted.law) == pytest.approx(astuple(CHINCHILLA), rel=1e-4)
    assert max(map(abs, fitted.residuals)) < 1e-8 and fitted.at_bounds == ()


@settings(max_examples=5)
@given(
    st.floats(0.5, 3), st.floats(0.2, 0.7), st.floats(0.2, 0.7), st.floats(0.3, 3), st.floats(0.3, 3)
)  # fmt: skip
def test_fit_joint_recovers_any_law(irreducible_loss, alpha, beta, of_size, of_length):
    planted = ScalingLaw(irreducible_loss, of_size * 1e6**alpha, alpha, of_length * 1e8**beta, beta)
    fitted = fit_joint(scaling_points(planted), resamples=0).law
    assert fitted.alpha == pytest.approx(alpha, abs=0.01) and fitted.beta == pytest.approx(beta, abs=0.01)
    assert fitted.loss(1e8, 1e10) == pytest.approx(planted.loss(1e8, 1e10), rel=2e-3)


def test_fit_joint_is_robust_to_an_outlier():
    points = scaling_points(CHINCHILLA)
    points[5] = ScalingPoint(points[5].parameters, points[5].tokens, 2 * points[5].loss)
    fitted = fit_joint(points, resamples=0)
    assert fitted.law.loss(1e8, 1e10) == pytest.approx(CHINCHILLA.loss(1e8, 1e10), rel=5e-3)
    assert fitted.residuals[5] == pytest.approx(math.log(2), abs=0.01)


def test_intervals_cover_the_true_loss():
    truth, covered = CHINCHILLA.loss(3e7, 3e9), 0
    for seed in range(6):
        fit = fit_joint(scaling_points(CHINCHILLA, noise=0.003, seed=seed), resamples=20, seed=seed)
        low, high = fit.interval(lambda law: law.loss(3e7, 3e9))
        assert low < fit.law.loss(3e7, 3e9) < high
        covered += low <= truth <= high
    assert covered >= 4


def test_fit_power():
    planted = PowerLaw(2.0, 300.0, 0.4)
    xs = np.geomspace(1e4, 1e7, 6)
    fitted = fit_power(xs, [planted.loss(x) for x in xs], resamples=0).law
    assert (fitted.irreducible_loss, fitted.exponent) == (pytest.approx(2.0, rel=1e-3), pytest.approx(0.4, rel=1e-3))


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (POINTS[:7], "7 runs of 2 sizes and 4 token counts are too few"),
        (
            scaling_points(CHINCHILLA)[:8],
            "8 runs of 2 sizes .* .try: 8 runs or more, of 3 sizes and 3 token counts or more",
        ),
        ([*POINTS, ScalingPoint(1e6, 1e6, math.nan)], "not a positive number"),
    ],
)
def test_fit_joint_rejects_invalid_points(points, message):
    with pytest.raises(DataError, match=message):
        fit_joint(points)


def test_analyze_predict_and_read_law(tmp_path):
    analysis = analyze(scaling_points(CHINCHILLA, count=3, noise=0.001))
    assert analysis.by_parameters is None and "L(N): 3 different runs are too few" in analysis.missing[0]
    near, far = analysis.predict(1e7, 1e9), analysis.predict(1e9, 1e11)
    assert (
        near.extrapolation == 1
        and not near.is_extrapolation
        and far.extrapolation == pytest.approx(1e4)
        and far.is_extrapolation
    )
    assert near.interval[0] < CHINCHILLA.loss(1e7, 1e9) < near.interval[1]
    best, around = analysis.compute_optimal(6e18)
    assert 6 * best.parameters * best.tokens == pytest.approx(6e18) and around[0] < best.parameters < around[1]
    write_json(tmp_path / FILE, analysis.to_dict())
    assert read_law(tmp_path) == analysis.joint.law
    assert fit_warnings(analysis)[:2] == list(analysis.missing)


@pytest.mark.parametrize(
    "joint",
    [None, {}, {"E": 1}, [1], *(dict.fromkeys(("E", "A", "alpha", "B", "beta"), x) for x in (-1, 1e-9, 10**400))],
)
def test_read_law_rejects_missing_or_invalid_fits(tmp_path, joint):
    write_json(tmp_path / FILE, {"joint": joint})
    with pytest.raises(ConfigError, match="joint fit"):
        read_law(tmp_path)


def test_read_law_without_file(tmp_path):
    with pytest.raises(ConfigError, match=r"scaling.json does not exist.*a finished mlxlm scaling"):
        read_law(tmp_path)


def test_hold_out_largest():
    points = scaling_points(CHINCHILLA)
    check = hold_out_largest(points)
    assert check.point == points[-1] and check.predicted == pytest.approx(points[-1].loss, rel=1e-3)
    assert hold_out_largest(points[:8]) is None


def test_analyze_too_few_runs():
    analysis = analyze(scaling_points(CHINCHILLA)[:3])
    assert analysis.joint is None and "it needs 8 runs or more" in analysis.missing[2]
    with pytest.raises(DataError, match="no joint fit"):
        analysis.predict(1, 1)
