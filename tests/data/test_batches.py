import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.data import TrainBatches
from mlxlm.data.batches import validation_batches
from mlxlm.data.dataset import DatasetPart
from mlxlm.data.packing import permute
from mlxlm.utils.errors import DataError


class Counting:
    """Tokens 0, 1, 2, ...: a token tells where it stood."""

    name = "the train data"

    def __init__(self, n):
        self._ids = np.arange(n, dtype=np.uint32)
        self.parts = [DatasetPart("train", 1.0, self)]

    def __len__(self):
        return len(self._ids)

    def slice(self, start, stop):
        assert 0 <= start <= stop <= len(self)
        return self._ids[start:stop]


@given(n=st.integers(11, 400), batch_size=st.integers(1, 7), seed=st.integers(0, 3))
@settings(max_examples=15)
def test_an_epoch_predicts_every_target_at_most_once(n, batch_size, seed):
    batches = TrainBatches(Counting(n), batch_size, 10, seed)
    needed = -(-2 * batches.rows // batch_size)
    rows = np.concatenate([batches.batch(i).tokens for i in range(needed)])
    assert rows.dtype == np.int32 and rows.shape[1] == 11
    assert (np.diff(rows, axis=1) == 1).all()
    for epoch in range(2):
        part = rows[epoch * batches.rows : (epoch + 1) * batches.rows, 1:]
        assert len(np.unique(part)) == part.size
        assert part.size >= n - 1 - 20 or n < 31
        assert len(np.unique(part[:, 0] % 10)) == 1  # one grid of windows
    assert batches.epoch_at(0) == 0
    assert batches.epoch_at(needed) == pytest.approx(needed * batch_size / batches.rows)


def test_epochs_differ_in_order_and_in_cuts():
    batches = TrainBatches(Counting(100_001), 10, 100, seed=0)
    per_epoch = -(-batches.rows // 10)
    starts = [np.concatenate([batches.batch(e * per_epoch + i).tokens[:, 0] for i in range(10)]) for e in range(3)]
    assert len({int(s[0] % 100) for s in starts}) > 1
    assert not np.array_equal(starts[0] // 100, starts[1] // 100)
    other = TrainBatches(Counting(100_001), 10, 100, seed=1)
    assert not np.array_equal(other.batch(0).tokens, batches.batch(0).tokens)


def test_a_batch_depends_on_nothing_but_its_index():
    first, second = (TrainBatches(Counting(5000), 8, 16, seed=5) for _ in range(2))
    later = {i: second.batch(i).tokens for i in (99, 3, 40)}
    for i in (3, 39, 40, 98, 99):
        assert i not in later or np.array_equal(first.batch(i).tokens, later[i])


def test_rows_do_not_depend_on_the_batch_size():
    small, large = TrainBatches(Counting(5000), 2, 16, seed=5), TrainBatches(Counting(5000), 6, 16, seed=5)
    assert np.array_equal(
        np.concatenate([small.batch(i).tokens for i in range(60)]),
        np.concatenate([large.batch(i).tokens for i in range(20)]),
    )


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 1000, 4097])
def test_permutation(n):
    keys = np.arange(4, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    values = permute(np.arange(n), n, keys)
    assert sorted(values.tolist()) == list(range(n))


def test_the_order_is_well_mixed():
    batches = TrainBatches(Counting(1_000_001), 100, 100, seed=0)
    starts = np.concatenate([batches.batch(i).tokens[:, 0] for i in range(12)]).astype(float)
    assert abs(np.corrcoef(starts[:-1], starts[1:])[0, 1]) < 0.1
    assert starts.mean() == pytest.approx(500_000, rel=0.06)


def test_too_few_tokens_name_a_length_that_works():
    with pytest.raises(DataError, match="10 tokens, too few for sequences of 10 .*a sequence length of 9 or less"):
        TrainBatches(Counting(10), 1, 10, 0)
    assert TrainBatches(Counting(10), 1, 9, 0).batch(7).tokens.tolist() == [list(range(10))]
    with pytest.raises(DataError, match="more text"):
        TrainBatches(Counting(1), 1, 1, 0)


@given(
    n=st.integers(2, 200),
    batch_size=st.integers(1, 5),
    length=st.integers(1, 30),
    limit=st.none() | st.integers(1, 250),
)
@settings(max_examples=25)
def test_validation_predicts_every_target_once(n, batch_size, length, limit):
    seen = []
    for tokens, segment_ids, mask in validation_batches(Counting(n), batch_size, length, limit):
        assert tokens.shape == (batch_size, length + 1) and tokens.dtype == np.int32
        assert mask.shape == (batch_size, length) and mask.dtype == np.float32
        assert mask.any() and segment_ids is None
        real = mask == 1
        assert (tokens[:, 1:][real] == tokens[:, :-1][real] + 1).all()
        assert (tokens[:, 1:][mask == 0] == 0).all()
        seen += tokens[:, 1:][real].tolist()
    if limit is None or limit >= n - 1 + length:
        assert seen == list(range(1, n))
    else:  # whole windows, each once, from all over the data
        assert seen == sorted(set(seen)) and len(seen) <= max(limit, length)
        windows = {(target - 1) // length for target in seen}
        total = -(-(n - 1) // length)
        assert windows == {i * total // len(windows) for i in range(len(windows))}


def test_validation_without_tokens():
    with pytest.raises(DataError, match="too few to predict any"):
        validation_batches(Counting(1), 2, 3)
