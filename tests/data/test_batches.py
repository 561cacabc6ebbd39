import threading
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.data import TrainBatches
from mlxlm.data.batches import BLOCK_ROWS, Mixture, prefetch, validation_batches
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


def reading_threads():
    return [t for t in threading.enumerate() if t.name.startswith("prefetch")]


@pytest.mark.parametrize("prefetch_factor", [1, 2, 5])
def test_results_come_in_order(prefetch_factor):
    assert list(prefetch(lambda n: n * n, range(3, 40), prefetch_factor)) == [n * n for n in range(3, 40)]
    assert list(prefetch(lambda n: n, [], prefetch_factor)) == []
    assert not reading_threads()


def test_the_next_is_read_while_this_one_is_used():
    """Two ahead, and no more; all in one thread."""
    read, threads, third = [], set(), threading.Event()

    def reads(n):
        read.append(n)
        threads.add(threading.current_thread())
        if n == 2:
            third.set()
        return n

    with closing(prefetch(reads, range(10))) as results:
        assert next(results) == 0
        assert third.wait(10)
        assert next(results) == 1
        assert len(read) <= 4
        assert len(threads) == 1 and threading.current_thread() not in threads
    assert not reading_threads()


def test_an_error_comes_where_its_result_would():
    def reads(n):
        if n == 3:
            raise DataError(f"no {n}")
        return n

    results = prefetch(reads, range(10))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="no 3"):
        next(results)
    assert not reading_threads()
    assert list(results) == []


def test_closing_waits_for_the_read_in_work_and_starts_no_other():
    read, begun, go_on = [], threading.Event(), threading.Event()

    def reads(n):
        read.append(n)
        if n == 1:
            begun.set()
            go_on.wait(10)
        return n

    results = prefetch(reads, range(10), prefetch_factor=3)
    assert next(results) == 0
    begun.wait(10)
    threading.Timer(0.05, go_on.set).start()
    results.close()
    assert go_on.is_set() and read == [0, 1] and not reading_threads()
