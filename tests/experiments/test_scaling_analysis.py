"""Analysis of a grid of runs: fits, predictions and warnings."""

import pytest

from mlxlm.experiments.scaling_analysis import FILE, analyze, fit_warnings, hold_out_largest, read_law
from mlxlm.plan.scaling_law import CHINCHILLA_LAW as CHINCHILLA
from mlxlm.utils.errors import ConfigError, DataError
from mlxlm.utils.json_files import write_json
from tests.experiments.scaling_points import scaling_points


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
