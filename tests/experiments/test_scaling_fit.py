"""Fits of scaling laws recover known laws."""

import math
from dataclasses import astuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from mlxlm.experiments.scaling_fit import HUBER_DELTA, ScalingPoint, fit_joint, fit_power
from mlxlm.plan.scaling_law import CHINCHILLA_LAW as CHINCHILLA
from mlxlm.plan.scaling_law import PowerLaw, ScalingLaw
from mlxlm.utils.errors import DataError
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


def test_fit_joint_is_a_minimum():
    points = scaling_points(CHINCHILLA, noise=0.01)

    def value(numbers):
        e, a, alpha, b, beta = numbers
        law = ScalingLaw(math.exp(e), math.exp(a), alpha, math.exp(b), beta)
        off = np.abs([math.log(law.loss(p.parameters, p.tokens) / p.loss) for p in points])
        return np.where(off <= HUBER_DELTA, off**2 / 2, HUBER_DELTA * (off - HUBER_DELTA / 2)).sum()

    law = fit_joint(points, resamples=0).law
    here = [math.log(law.E), math.log(law.A), law.alpha, math.log(law.B), law.beta]
    assert minimize(value, here, method="Nelder-Mead", options={"maxfev": 600}).fun >= value(here) * (1 - 1e-6)
    planted = (1.69, 406.4, None, 410.7, None)
    truth = [math.log(x) if x else y for x, y in zip(planted, (0, 0, 0.34, 0, 0.28), strict=True)]
    assert value(here) < value(truth)


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
