"""Variants of a model as text."""

import pytest

from mlxlm.experiments.architecture_comparison import Variant
from mlxlm.utils.errors import ConfigError


def test_parse():
    assert Variant.parse("base") == Variant("base", {}, {})
    assert Variant.parse("alibi") == Variant("alibi", {"positions": "alibi"}, {})
    assert Variant.parse("rope_scaling=yarn:4").parts == {"rope_scaling": "yarn:4"}
    read = Variant.parse("my way: hidden_size=64, dropout=0.1,learning_rate=1e-3")
    assert read == Variant("my way", {"hidden_size": "64"}, {"dropout": 0.1, "learning_rate": 1e-3})
    assert read.folder == "my-way"
    scaling = '{"rope_type": "linear", "factor": 2}'
    assert Variant.parse(f"x: rope_scaling={scaling}, norm=layer").parts == {"rope_scaling": scaling, "norm": "layer"}
    nested = '{"rope_type": "linear", "a": {"b": [1, 2], "c": 1}, "factor": 2}'
    assert Variant.parse(f"x: rope_scaling={nested}, seed=1") == Variant("x", {"rope_scaling": nested}, {"seed": 1})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wide", "variant 'wide' changes nothing .try: \"wide: NAME=VALUE\", or base"),
        ("wide:", "'wide:' is not a variant"),
        ("x: dropout=many", "variant x: dropout is 'many' .try: a number"),
        ("x: batch_size=4", "variant x: batch_size can't differ between variants .try: one budget"),
        ("x: norm=layer,", "variant x: '' sets nothing"),
        ("x: seed=1, seed=2", "variant x: seed is set to both 1 and 2"),
    ],
)
def test_parse_rejects_other_text(text, message):
    with pytest.raises(ConfigError, match=message):
        Variant.parse(text)
