"""Scaling laws: compute-optimal models and repeated data."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxlm.plan.model_sizes import model_family, nearest_model, parse_size, vocab_size_for
from mlxlm.plan.scaling_law import CHINCHILLA_LAW as CHINCHILLA
from mlxlm.plan.scaling_law import ScalingLaw, effective_amount
from mlxlm.utils.errors import ConfigError


@given(st.floats(9, 24), st.floats(0.2, 0.8), st.floats(0.2, 0.8))
def test_compute_optimal_minimizes_the_loss(power, alpha, beta):
    law, flops = ScalingLaw(1.7, 400.0, alpha, 410.0, beta), 10**power
    parameters, tokens = law.compute_optimal(flops)
    assert 6 * parameters * tokens == pytest.approx(flops)
    others = [parameters * math.exp(shift) for shift in (-1, -0.1, -1e-3, 1e-3, 0.1, 1)]
    assert all(law.loss(parameters, tokens) <= law.loss(other, flops / 6 / other) * (1 + 1e-12) for other in others)
    assert law.optimal_tokens(parameters) == pytest.approx(tokens)
    assert law.optimal_parameters(tokens) == pytest.approx(parameters)


@pytest.mark.parametrize("law", [ScalingLaw(0.0, 0.0, 0.02, 1.0, 0.02), ScalingLaw(1.0, 1e30, 0.02, 1e-30, 0.02)])
def test_extreme_exponents_give_finite_values(law):
    assert all(math.isfinite(x) and x > 0 for x in (*law.compute_optimal(1e15), law.optimal_parameters(1e6)))
    assert math.isfinite(law.loss_with_repetition(1e6, 1e7, 1e5))


def test_more_parameters_than_a_text_supports_are_worth_little():
    few = CHINCHILLA.optimal_parameters(1e5)
    assert CHINCHILLA.loss_with_repetition(few, 1e5, 1e5) == CHINCHILLA.loss(few, 1e5)
    ten, thousand = (CHINCHILLA.loss_with_repetition(n * few, 4e5, 1e5) for n in (10, 1000))
    assert ten > CHINCHILLA.loss(10 * few, 4e5)
    assert thousand == pytest.approx(CHINCHILLA.loss_with_repetition(1e5 * few, 4e5, 1e5), rel=1e-3)


def test_effective_amount_of_repeated_text():
    assert effective_amount(50, 100) == 50 and effective_amount(100, 100) == 100
    assert effective_amount(400, 100) == pytest.approx(100 * (1 + 15.39 * (1 - math.exp(-3 / 15.39))))
    assert effective_amount(400, 100) / 400 > 0.92  # four passes are nearly as good as new text
    assert effective_amount(1e9, 100) == pytest.approx(1639)


def test_model_family_is_ordered_and_has_constant_proportions():
    members = model_family(1024)
    counts = [c.parameter_count() for c in members]
    assert counts == sorted(counts) and counts[0] < 5e4 and counts[-1] > 3e9
    assert all(24 <= c.hidden_size / c.num_hidden_layers <= 36 for c in members)
    assert all(c.hidden_size == c.num_attention_heads * c.head_dim for c in members)
    assert all(b / a < 2.3 for a, b in zip(counts, counts[1:], strict=False))
    assert nearest_model(4.2e5, 1024).hidden_size == 96


@pytest.mark.parametrize(("text", "value"), [("0.3m", 3e5), ("300k", 3e5), ("1.2B", 1.2e9), ("5e6", 5e6), ("7", 7)])
def test_parse_size(text, value):
    assert parse_size(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "m", "-1m", "1.2.3m", "1t", "0", "1e99"])
def test_parse_size_rejects_other_text(text):
    with pytest.raises(ConfigError, match="is not a number of parameters"):
        parse_size(text)


def test_vocab_size_for():
    assert [vocab_size_for(n) for n in (1e3, 1e5, 4e5, 5e6, 1e9)] == [1024, 1024, 2048, 8192, 32768]
