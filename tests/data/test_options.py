import pytest

from mlxlm.data import DataOptions, parse_weighted_sources
from mlxlm.utils.errors import DataError


@pytest.mark.parametrize("options, message", [
    *(({"validation_fraction": fraction}, "validation_fraction is") for fraction in (-0.1, 1, 2, 1e-300)),
    *(({"dedup": threshold}, "dedup is") for threshold in (0, -0.1, 1.01, float("nan"))),
    ({"on_bad_input": "ignore"}, "on_bad_input is 'ignore', it must be one of stop, skip"),
    ({"weights": [1]}, "2 sources have 1 weights"),
    ({"weights": [1, 0]}, "a weight is 0"),
])  # fmt: skip
def test_values_that_cannot_work(options, message):
    with pytest.raises(DataError, match=message):
        DataOptions(["a.txt", "b.txt"], **options)


def test_weights_are_normalized_and_names_unique():
    data = DataOptions(["x/a.txt", "y/a.txt", "-"], weights=[2, 1, 1])
    assert data.weights == [0.5, 0.25, 0.25]
    assert data.source_names() == ["a.txt", "a.txt (2)", "stdin"]


def test_weights_below_a_thousandth_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"smallest share is 0\.001"):
        parse_weighted_sources(["a.txt=1e-9", "b.txt=1"])


def test_weights_follow_paths(tmp_path):
    odd = tmp_path / "a=0.5"
    odd.write_text("x")
    assert parse_weighted_sources([str(odd), "b.txt"]) == ([str(odd), "b.txt"], None)
    assert parse_weighted_sources([f"{odd}=3", "b=c.txt=1"]) == ([str(odd), "b=c.txt"], [0.75, 0.25])
    assert parse_weighted_sources(["a=b", "-"]) == (["a=b", "-"], None)
    assert parse_weighted_sources(["-=1e0", "x=7"]) == (["-", "x"], [0.125, 0.875])


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        (["a=1", "b"], "b has no weight"),
        (["a=0", "b=1"], "a weight is 0.0"),
        (["a=-1"], "a weight is -1.0"),
        (["a=nan"], "a weight is nan"),
        (["a=inf", "b=1"], "a weight is inf"),
    ],
)
def test_invalid_weights(sources, message):
    with pytest.raises(DataError, match=f"{message}.*try: wiki.txt=0.7"):
        parse_weighted_sources(sources)
