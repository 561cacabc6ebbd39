"""Scaling laws: planted ones are found again, intervals cover them, and the best use of a budget is the best."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize, minimize_scalar

from mlxlm.experiments.scaling_analysis import FILE, analyze, fit_warnings, read_law
from mlxlm.experiments.scaling_fit import HUBER_DELTA, ScalingPoint, fit_joint, fit_power, fit_without_largest
from mlxlm.plan.model_sizes import model_family, nearest_model, parse_size, vocab_size_for
from mlxlm.plan.scaling_law import CHINCHILLA_LAW as CHINCHILLA
from mlxlm.plan.scaling_law import PowerLaw, ScalingLaw, effective_amount
from mlxlm.utils.errors import ConfigError, DataError
from mlxlm.utils.json_files import write_json


def grid(law, sizes=(1e5, 1e7), lengths=(1e7, 1e9), count=4, noise=0.0, seed=0):
    draw = np.random.default_rng(seed)
    return [
        ScalingPoint(n, d, law.loss(n, d) * math.exp(noise * draw.normal()))
        for n in np.geomspace(*sizes, count)
        for d in np.geomspace(*lengths, count)
    ]


def test_chinchilla_s_constants_are_found_again():
    found = fit_joint(grid(CHINCHILLA), resamples=0)
    assert list(found.law.to_dict().values()) == pytest.approx(list(CHINCHILLA.to_dict().values()), rel=1e-4)
    assert max(map(abs, found.residuals)) < 1e-8 and found.at_bounds == ()


@settings(max_examples=8)
@given(
    st.floats(0.5, 3), st.floats(0.2, 0.7), st.floats(0.2, 0.7), st.floats(0.3, 3), st.floats(0.3, 3)
)  # fmt: skip
def test_any_law_is_found_again(irreducible_loss, alpha, beta, of_size, of_length):
    planted = ScalingLaw(irreducible_loss, of_size * 1e6**alpha, alpha, of_length * 1e8**beta, beta)
    found = fit_joint(grid(planted), resamples=0).law
    assert found.alpha == pytest.approx(alpha, abs=0.01) and found.beta == pytest.approx(beta, abs=0.01)
    assert found.loss(1e8, 1e10) == pytest.approx(planted.loss(1e8, 1e10), rel=2e-3)


def test_one_run_that_went_astray_changes_little():
    points = grid(CHINCHILLA)
    points[5] = ScalingPoint(points[5].parameters, points[5].tokens, 2 * points[5].loss)
    found = fit_joint(points, resamples=0)
    assert found.law.loss(1e8, 1e10) == pytest.approx(CHINCHILLA.loss(1e8, 1e10), rel=5e-3)
    assert found.residuals[5] == pytest.approx(math.log(2), abs=0.01)


def test_a_general_minimizer_finds_nothing_lower():
    points = grid(CHINCHILLA, noise=0.01)

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


def test_intervals_cover_the_truth_most_of_the_time():
    truth, covered = CHINCHILLA.loss(3e7, 3e9), 0
    for seed in range(10):
        fit = fit_joint(grid(CHINCHILLA, noise=0.003, seed=seed), resamples=20, seed=seed)
        low, high = fit.interval(lambda law: law.loss(3e7, 3e9))
        assert low < fit.law.loss(3e7, 3e9) < high
        covered += low <= truth <= high
    assert covered >= 7


def test_a_power_law_of_one():
    planted = PowerLaw(2.0, 300.0, 0.4)
    xs = np.geomspace(1e4, 1e7, 6)
    found = fit_power(xs, [planted.loss(x) for x in xs], resamples=0).law
    assert (found.irreducible_loss, found.exponent) == (pytest.approx(2.0, rel=1e-3), pytest.approx(0.4, rel=1e-3))


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (grid(CHINCHILLA)[:7], "7 runs of 2 sizes and 4 token counts are too few"),
        (grid(CHINCHILLA)[:8], "8 runs of 2 sizes .* .try: 8 runs or more, of 3 sizes and 3 token counts or more"),
        ([*grid(CHINCHILLA), ScalingPoint(1e6, 1e6, math.nan)], "not a positive number"),
    ],
)
def test_what_can_t_be_fitted(points, message):
    with pytest.raises(DataError, match=message):
        fit_joint(points)


@given(st.floats(9, 24), st.floats(0.2, 0.8), st.floats(0.2, 0.8))
def test_the_optimum_is_the_lowest_loss_of_its_operations(power, alpha, beta):
    law, flops = ScalingLaw(1.7, 400.0, alpha, 410.0, beta), 10**power
    parameters, tokens = law.compute_optimal(flops)
    assert 6 * parameters * tokens == pytest.approx(flops)
    best = minimize_scalar(lambda x: law.loss(math.exp(x), flops / 6 / math.exp(x)), bounds=(-20, 60), method="bounded",
                           options={"xatol": 1e-10})  # fmt: skip
    assert law.loss(parameters, tokens) <= best.fun * (1 + 1e-12)
    assert math.log(parameters) == pytest.approx(best.x, abs=1e-3)
    assert law.optimal_tokens(parameters) == pytest.approx(tokens)
    assert law.optimal_parameters(tokens) == pytest.approx(parameters)


@pytest.mark.parametrize("law", [ScalingLaw(0.0, 0.0, 0.02, 1.0, 0.02), ScalingLaw(1.0, 1e30, 0.02, 1e-30, 0.02)])
def test_a_law_at_its_bounds_has_finite_answers(law):
    assert all(math.isfinite(x) and x > 0 for x in (*law.compute_optimal(1e15), law.optimal_parameters(1e6)))
    assert math.isfinite(law.loss_with_repetition(1e6, 1e7, 1e5))


def test_what_learns_a_text_by_heart_is_no_better():
    few = CHINCHILLA.optimal_parameters(1e5)
    assert CHINCHILLA.loss_with_repetition(few, 1e5, 1e5) == CHINCHILLA.loss(few, 1e5)
    ten, hundred = (
        CHINCHILLA.loss_with_repetition(10 * few, 4e5, 1e5),
        CHINCHILLA.loss_with_repetition(100 * few, 4e5, 1e5),
    )
    assert ten > CHINCHILLA.loss(10 * few, 4e5)
    assert hundred == pytest.approx(CHINCHILLA.loss_with_repetition(1e4 * few, 4e5, 1e5), rel=1e-3)


def test_the_largest_run_is_predicted_from_the_others():
    points = grid(CHINCHILLA)
    last, fit = fit_without_largest(points)
    assert last == points[-1]
    assert fit.law.loss(last.parameters, last.tokens) == pytest.approx(last.loss, rel=1e-3)
    assert fit_without_largest(points[:8]) is None


def test_repeated_text_is_worth_less_and_less():
    assert effective_amount(50, 100) == 50 and effective_amount(100, 100) == 100
    assert effective_amount(400, 100) == pytest.approx(100 * (1 + 15.39 * (1 - math.exp(-3 / 15.39))))
    assert effective_amount(400, 100) / 400 > 0.92  # four passes are nearly as good as new text
    assert effective_amount(1e9, 100) == pytest.approx(1639)


def test_an_analysis_predicts_and_says_how_far_that_is(tmp_path):
    found = analyze(grid(CHINCHILLA, count=3, noise=0.001))
    assert found.by_parameters is None and "L(N): 3 different runs are too few" in found.missing[0]
    near, far = found.predict(1e7, 1e9), found.predict(1e9, 1e11)
    assert (
        near.extrapolation == 1
        and not near.is_extrapolation
        and far.extrapolation == pytest.approx(1e4)
        and far.is_extrapolation
    )
    assert near.interval[0] < CHINCHILLA.loss(1e7, 1e9) < near.interval[1]
    best, around = found.compute_optimal(6e18)
    assert 6 * best.parameters * best.tokens == pytest.approx(6e18) and around[0] < best.parameters < around[1]
    write_json(tmp_path / FILE, found.to_dict())
    assert read_law(tmp_path) == found.joint.law
    assert fit_warnings(found)[:2] == list(found.missing)


@pytest.mark.parametrize(
    "joint",
    [None, {}, {"E": 1}, [1], *(dict.fromkeys(("E", "A", "alpha", "B", "beta"), x) for x in (-1, 1e-9, 10**400))],
)
def test_a_folder_without_a_law(tmp_path, joint):
    write_json(tmp_path / FILE, {"joint": joint})
    with pytest.raises(ConfigError, match="joint fit"):
        read_law(tmp_path)


def test_a_folder_whose_grid_has_not_ended(tmp_path):
    with pytest.raises(ConfigError, match=r"scaling.json does not exist.*a finished mlxlm scaling"):
        read_law(tmp_path)


def test_analysis_of_too_few_runs_says_what_it_takes():
    found = analyze(grid(CHINCHILLA)[:3])
    assert found.joint is None and "it needs 8 runs or more" in found.missing[2]
    with pytest.raises(DataError, match="no joint fit"):
        found.predict(1, 1)


def test_the_family_grows_and_keeps_its_shape():
    members = model_family(1024)
    counts = [c.parameter_count() for c in members]
    assert counts == sorted(counts) and counts[0] < 5e4 and counts[-1] > 3e9
    assert all(24 <= c.hidden_size / c.num_hidden_layers <= 36 for c in members)
    assert all(c.hidden_size == c.num_attention_heads * c.head_dim for c in members)
    assert all(b / a < 2.3 for a, b in zip(counts, counts[1:], strict=False))
    assert nearest_model(4.2e5, 1024).hidden_size == 96


@pytest.mark.parametrize(("text", "value"), [("0.3m", 3e5), ("300k", 3e5), ("1.2B", 1.2e9), ("5e6", 5e6), ("7", 7)])
def test_sizes_are_read(text, value):
    assert parse_size(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "m", "-1m", "1.2.3m", "1t", "0", "1e99"])
def test_what_is_no_size(text):
    with pytest.raises(ConfigError, match="is not a number of parameters"):
        parse_size(text)


def test_vocabularies_are_those_of_the_presets_nearly():
    assert [vocab_size_for(n) for n in (1e3, 1e5, 4e5, 5e6, 1e9)] == [512, 512, 1024, 4096, 32768]
