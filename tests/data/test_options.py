import pytest

from mlxlm.data import DataOptions
from mlxlm.utils.errors import DataError


@pytest.mark.parametrize("options, message", [
    *(({"validation_fraction": fraction}, "validation fraction") for fraction in (-0.1, 1, 2, 1e-300)),
    *(({"dedup": threshold}, "dedup is") for threshold in (0, -0.1, 1.01, float("nan"))),
    ({"on_bad_input": "ignore"}, "on_bad_input is 'ignore' .try: stop or skip"),
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
