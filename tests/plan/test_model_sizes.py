"""The family of models by size."""

import pytest

from mlxlm.plan.model_sizes import model_family, nearest_model, parse_size, vocab_size_for
from mlxlm.utils.errors import ConfigError


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
    assert [vocab_size_for(n) for n in (1e3, 1e5, 4e5, 5e6, 1e9)] == [512, 512, 1024, 4096, 32768]
