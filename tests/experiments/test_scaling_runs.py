"""Sizes and lengths of the runs of a grid."""

import pytest

from mlxlm.experiments.scaling_grid import TRAINING_FRACTION, GridOptions, fit_to_time
from mlxlm.plan.model_sizes import model_family
from mlxlm.utils.errors import ConfigError


@pytest.mark.parametrize("seconds", [10.0, 1e4, 1e5])
def test_default_grid_fills_the_time_and_repeats_little_text(seconds):
    members = model_family(512)

    def token_seconds(config):
        return 6 * config.parameter_count() / 1e10

    lengths = fit_to_time(members, token_seconds, 1e7, GridOptions(minutes=seconds / 60 / TRAINING_FRACTION))
    assert len(lengths) == 16 and len({c.hidden_size for c, _ in lengths}) == 4 and len({n for _, n in lengths}) == 4
    assert max(n for _, n in lengths) <= 1e7
    total = sum(token_seconds(c) * n for c, n in lengths)
    assert total <= seconds
    if seconds > 100:
        assert total > 0.3 * seconds


def test_explicit_lengths_must_fit_the_time():
    members = model_family(512)

    def token_seconds(config):
        return 6 * config.parameter_count() / 1e10

    max_tokens = 2 * members[3].parameter_count()
    options = GridOptions(tokens_per_parameter=[1, 5, 10], minutes=200)
    lengths = fit_to_time(members, token_seconds, max_tokens, options)
    assert len({(c.hidden_size, n) for c, n in lengths}) == len(lengths) and max(n for _, n in lengths) == max_tokens
    with pytest.raises(ConfigError, match="even the smallest models take longer"):
        fit_to_time(members, token_seconds, 1e12, GridOptions(tokens=[1e9, 2e9], minutes=0.2))
