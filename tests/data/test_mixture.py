"""Mixture: the source of each row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.data.batches import BLOCK_ROWS, Mixture
from mlxlm.utils.errors import DataError


@given(weights=st.lists(st.floats(1e-5, 1), min_size=1, max_size=6), seed=st.integers(0, 5), block=st.integers(0, 999))
@settings(max_examples=30)
def test_rows_of_a_block_follow_the_weights(weights, seed, block):
    mixture = Mixture(weights, seed)
    assert mixture.counts.sum() == BLOCK_ROWS and mixture.counts.min() >= 1
    wanted = np.array(weights) / sum(weights) * BLOCK_ROWS
    assert (np.abs(mixture.counts - wanted) < 1 + len(weights)).all()
    places = [mixture.locate(block * BLOCK_ROWS + i) for i in range(BLOCK_ROWS)]
    for source, count in enumerate(mixture.counts.tolist()):
        assert [n for s, n in places if s == source] == list(range(block * count, (block + 1) * count))
    sources = [s for s, _ in places]
    for at in (0, 1, 313, 999):
        before = mixture.rows_before(block * BLOCK_ROWS + at)
        assert before.tolist() == [block * c + sources[:at].count(i) for i, c in enumerate(mixture.counts)]


def test_weights_are_rounded_to_a_thousandth():
    assert Mixture([0.7, 0.2, 0.1], 0).counts.tolist() == [700, 200, 100]
    assert Mixture([1.0], 0).counts.tolist() == [1000]
    assert Mixture([1.0, 1e-9], 0).counts.tolist() == [999, 1]
    first, second = (Mixture([0.5, 0.5], seed) for seed in (0, 1))
    assert [first.locate(i) for i in range(50)] != [second.locate(i) for i in range(50)]
    with pytest.raises(DataError, match="1001 sources with weights are too many .try: at most 1000"):
        Mixture([1.0] * 1001, 0)
