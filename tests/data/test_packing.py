"""Rows out of documents: what is in them, in which order, and that any of them is found without those before."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.data import DataOptions, TokenDataset, TrainBatches, packing, prepare
from mlxlm.data.batches import BLOCK_ROWS, validation_batches
from mlxlm.data.dataset import DatasetPart, DocumentStarts
from mlxlm.data.packing import BestFitPacking, first_fit_decreasing
from mlxlm.utils.errors import DataError

lengths_of_documents = st.lists(st.integers(1, 40), min_size=1, max_size=80)


class Documents:
    """Tokens 0, 1, 2, ... in documents of these lengths, in shards of `shard` tokens; odd tokens are to be learned."""

    def __init__(self, lengths, shard=64, name="the train data"):
        self.name = name
        self.total = sum(lengths)
        self.first = np.cumsum([0, *lengths[:-1]])
        self.last = self.first + lengths
        ends = [*range(shard, self.total, shard), self.total]
        inside = [self.first[(self.first >= e - shard) & (self.first < e)] for e in ends[:-1]]
        inside.append(self.first[self.first >= (ends[-2] if len(ends) > 1 else 0)])
        begins = [0, *ends[:-1]]
        self.starts = DocumentStarts([f - b for f, b in zip(inside, begins, strict=True)], ends)
        self.parts = [DatasetPart("train", 1.0, self)]

    def __len__(self):
        return self.total

    def slice(self, start, stop):
        assert 0 <= start <= stop <= self.total
        return np.arange(start, stop)

    def loss_mask(self, start, stop):
        return np.arange(start, stop) % 2

    def targets(self):
        return self.total // 2

    def segment_ids(self, start, stop):
        numbers = self.of(np.arange(start, stop))
        return (numbers - numbers[0]).astype(np.int32) if len(numbers) else numbers.astype(np.int32)

    def of(self, tokens):
        """The document of each token."""
        return np.searchsorted(self.first, tokens, side="right") - 1


def plainly_packed(lengths, room):
    """First-fit decreasing, document by document."""
    rows = []
    for size in sorted(lengths, reverse=True):
        for row in rows:
            if sum(row) + size <= room:
                row.append(size)
                break
        else:
            rows.append([size])
    return sorted(rows)


@given(lengths=st.lists(st.integers(1, 30), max_size=120), room=st.integers(30, 60))
@settings(max_examples=20)
def test_documents_are_packed_first_fit_decreasing(lengths, room):
    patterns = first_fit_decreasing(np.bincount(lengths, minlength=room + 1))
    rows = [np.repeat(p.sizes, p.counts).tolist() for p in patterns for _ in range(p.repeats)]
    assert sorted(rows) == plainly_packed(lengths, room)


@given(lengths=lengths_of_documents, length=st.integers(1, 60), seed=st.integers(0, 9), shard=st.integers(5, 90))
@settings(max_examples=20)
def test_rows_have_whole_documents_and_every_target_once(lengths, length, seed, shard):
    """In each epoch: what fits a row is whole in exactly one; of longer ones each token is a target exactly once."""
    data = Documents(lengths, shard)
    rows = BestFitPacking(data, length + 1, seed)
    for epoch in range(2):
        found = [rows.spans(row) for row in range(epoch * rows.rows, (epoch + 1) * rows.rows)]
        assert all(0 < sum(s.stop - s.start for s in spans) <= length + 1 for spans in found)
        spans = sorted(span for of_row in found for span in of_row)
        for first, last in zip(data.first.tolist(), data.last.tolist(), strict=True):
            pieces = [s for s in spans if first <= s.start < last]
            if last - first <= length + 1:
                assert pieces == [(first, last, False)]
                continue
            assert [s.start for s in pieces] == [first, *(s.stop - 1 for s in pieces[:-1])] and pieces[-1].stop == last
            assert all(s.stop - s.start == length + 1 for s in pieces[:-1]) and pieces[-1].stop - pieces[-1].start > 1
            assert [s.continues for s in pieces] == [False] + [True] * (len(pieces) - 1)
        assert rows.dropped_fraction == 0 and len(spans) >= len(lengths)
        tokens = sum(s.stop - s.start for s in spans)
        assert rows.padding == pytest.approx(1 - tokens / (rows.rows * (length + 1)))


@pytest.mark.parametrize(("lengths", "rows"), [([4000], 20), ([1300, 2700, 150], 21), ([201] * 7, 7), ([202] * 2, 3)])
def test_long_documents_are_complete(lengths, rows):
    """Of a single one, too: in as many rows of 200 targets as it takes."""
    data = Documents(lengths)
    batches = TrainBatches(data, 1, 200, 0, packing="best-fit", document_mask=True)
    assert batches.rows == rows and batches.dropped_fraction == 0
    targets = []
    for index in range(batches.rows):
        tokens, segment_ids, weights = batches.batch(index)
        targets += tokens[0, 1:][weights[0] > 0].tolist()
        assert (np.diff(segment_ids[0]) >= 0).all()
    begins = {int(first) for first in data.first}
    assert sorted(set(targets) | begins) == list(range(len(data)))
    others = [t for t in targets if t not in begins]
    assert len(others) == len(set(others))


@pytest.mark.parametrize("lengths", [np.random.default_rng(0).integers(3, 60, 200).tolist(), [40] * 50])
def test_epochs_differ_in_order_and_grouping(lengths):
    data = Documents(lengths)
    rows = BestFitPacking(data, 130, 0)
    epochs = [[tuple(rows.spans(e * rows.rows + i)) for i in range(rows.rows)] for e in range(3)]
    for e in range(1, 3):
        assert len(set(epochs[e]) & set(epochs[0])) < len(epochs[0]) / 2
    assert [tuple(BestFitPacking(data, 130, 0).spans(i)) for i in range(rows.rows)] == epochs[0]
    assert [tuple(BestFitPacking(data, 130, 1).spans(i)) for i in range(rows.rows)] != epochs[0]


def test_finding_a_row_packs_one_block(monkeypatch):
    """However many come before it, though blocks differ in their rows."""
    monkeypatch.setattr(packing, "PACKING_BLOCK", 64)
    data = Documents([90] * 25 + np.random.default_rng(1).integers(1, 30, 475).tolist())
    rows = BestFitPacking(data, 33, 5)
    assert len(set(np.diff(rows._ends))) > 3
    counted, real = [], packing.first_fit_decreasing
    monkeypatch.setattr(packing, "first_fit_decreasing", lambda counts: counted.append(counts.sum()) or real(counts))
    late = rows.spans(10**9 + 7)
    assert counted in ([62], [63])
    fresh = BestFitPacking(data, 33, 5)
    in_order = [fresh.spans(i) for i in range(2 * rows.rows)]
    assert [rows.spans(i) for i in reversed(range(2 * rows.rows))] == in_order[::-1]
    assert rows.spans(10**9 + 7) == late
    for epoch in (in_order[: rows.rows], in_order[rows.rows :]):
        assert sorted(s.start for spans in epoch for s in spans if not s.continues) == data.first.tolist()


def form(packing, **changes):
    return {"packing": packing, "document_mask": True, "mask_prompt": True, **changes}


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
@given(lengths=st.lists(st.integers(1, 40), min_size=4, max_size=40), seed=st.integers(0, 5))
@settings(max_examples=15)
def test_documents_and_weights_of_a_batch(packing, lengths, seed):
    data = Documents([60, *lengths])
    batches = TrainBatches(data, 3, 20, seed, **form(packing))
    for index in (0, 7):
        tokens, segment_ids, weights = batches.batch(index)
        assert tokens.dtype == np.int32 and tokens.shape == (3, 21)
        assert segment_ids.dtype == np.int32 and weights.dtype == np.float32
        for i, (row, numbers) in enumerate(zip(tokens, segment_ids, strict=True)):
            spans = batches._packings[0].spans(3 * index + i)
            n = sum(s.stop - s.start for s in spans)
            continued = {s.start for s in spans if s.continues}
            assert weights[i, : n - 1].tolist() == [t % 2 * (t not in continued) for t in row[1:n]]
            # Padding is of no document and is not learned; nothing else has its number.
            assert not row[n:].any() and not weights[i, n - 1 :].any()
            assert set(numbers[n:]) <= {numbers[min(n, 20) - 1] + 1} and (packing == "best-fit" or n == 21)
            row, numbers = row[: min(n, 20)], numbers[: min(n, 20)]
            # One number for each document, also the same one twice, rising by one along the row.
            begins = (np.diff(data.of(row)) != 0) | (np.diff(row) != 1)
            assert numbers[0] == 0 and (np.diff(numbers) == begins).all()
        plain = TrainBatches(data, 3, 20, seed, packing=packing).batch(index)
        assert np.array_equal(plain.tokens, tokens) and plain.segment_ids is None
        assert (plain.loss_weights is None) == (packing == "concatenate")


@pytest.mark.parametrize("packing", ["concatenate", "best-fit"])
@pytest.mark.parametrize("num_processes", [2, 3])
def test_processes_share_the_batches(packing, num_processes):
    """A step of `num_processes` that accumulate twice is the step of one that accumulates 2 · ranks times."""
    lengths = np.random.default_rng(2).integers(1, 50, 100).tolist()
    alone = TrainBatches(Documents(lengths), 2, 16, 3, **form(packing))
    shared = [
        TrainBatches(Documents(lengths), 2, 16, 3, rank=r, num_processes=num_processes, **form(packing))
        for r in range(num_processes)
    ]
    for step in range(5):
        single = [alone.batch(step * 2 * num_processes + i) for i in range(2 * num_processes)]
        together = [batches.batch(step * 2 + i) for i in range(2) for batches in shared]
        for one, other in zip(single, together, strict=True):
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
        assert shared[0].epoch_at(step * 2) == alone.epoch_at(step * 2 * num_processes)
        assert shared[0].epochs(step * 2) == alone.epochs(step * 2 * num_processes)


class Mixed:
    def __init__(self, *parts):
        self.parts = [DatasetPart(f"part {i}", weight, data) for i, (weight, data) in enumerate(parts)]


def test_every_source_goes_through_its_own_epochs():
    """A source of 10 rows and one of 100, half of the rows each: the targets of each come once an epoch."""
    small, large = Documents([161]), Documents([1617])
    batches = TrainBatches(Mixed((0.5, small), (0.5, large)), 4, 16, 0)
    assert batches.rows == 9 + 100
    rows = np.concatenate([batches.batch(i).tokens for i in range(250)])
    assert len(rows) == 1000
    epochs = batches.epochs(250)
    assert epochs == {"part 0": pytest.approx(500 / 9), "part 1": 5.0}
    assert batches.epoch_at(250) == pytest.approx(1000 / 109)
    late = TrainBatches(Mixed((0.5, small), (0.5, large)), 4, 16, 0).batch(249).tokens
    assert np.array_equal(rows[-4:], late)
    alone = TrainBatches(small, 1, 16, 0)  # the rows of the first source, as they would come alone
    of_small = [row for row, (s, _) in zip(rows, map(batches._mixture.locate, range(1000)), strict=True) if s == 0]
    assert all(np.array_equal(row, alone.batch(i).tokens[0]) for i, row in enumerate(of_small))


def test_a_part_that_fills_no_row_is_named():
    parts = Mixed((0.5, Documents([300])), (0.5, Documents([9], name="the train data of tiny.txt")))
    with pytest.raises(DataError, match="the train data of tiny.txt has 9 tokens, too few for sequences of 16"):
        TrainBatches(parts, 4, 16, 0)


@given(lengths=lengths_of_documents, rows=st.integers(1, 4), length=st.integers(2, 30))
@settings(max_examples=15)
def test_validation_of_answers_has_every_conversation_from_its_start(lengths, rows, length):
    data = Documents([3, *lengths])
    wanted: list[list[int]] = []  # the documents of each row
    room = 0
    for number, size in enumerate(np.minimum([3, *lengths], length + 1).tolist()):
        if not (np.arange(data.first[number], data.first[number] + size)[1:] % 2).any():
            continue  # nothing to learn
        if size > room:
            wanted.append([])
            room = length + 1
        wanted[-1].append(number)
        room -= size
    batches = list(validation_batches(data, rows, length, document_mask=True, mask_prompt=True))
    assert {(b.tokens.shape, b.segment_ids.shape, b.loss_weights.shape) for b in batches} == {
        ((rows, length + 1), (rows, length), (rows, length))
    }
    found = [row for b in batches for row in zip(*b, strict=True)]
    assert not any(weights.any() for _, _, weights in found[len(wanted) :])
    for documents, (tokens, numbers, weights) in zip(wanted, found, strict=False):
        text = [np.arange(data.first[i], min(data.last[i], data.first[i] + length + 1)) for i in documents]
        text, of = np.concatenate(text), np.repeat(np.arange(len(documents)), list(map(len, text)))
        padding = length + 1 - len(text)
        assert np.array_equal(tokens, np.pad(text, (0, padding)))
        assert np.array_equal(weights, np.pad(text[1:] % 2, (0, padding)))
        assert np.array_equal(numbers, np.pad(of, (0, padding), constant_values=len(documents))[:length])


class Unlearned(Documents):
    """Of which nothing is to be learned but the last token."""

    def loss_mask(self, start, stop):
        return (np.arange(start, stop) == self.total - 1).astype(np.uint8)


def test_batches_without_targets_are_an_error():
    data = Unlearned([30, 10, 30])
    for form in ({}, {"max_tokens": 1}):
        with pytest.raises(DataError, match="no answers that begin in rows of 20 tokens .*a longer sequence length"):
            validation_batches(data, 2, 20, mask_prompt=True, **form)
    [batch] = validation_batches(data, 2, 29, mask_prompt=True)
    assert batch.loss_weights.sum() == 1 and batch.tokens[0, 0] == 40
    with pytest.raises(DataError, match="batch 1 of the train data has no training targets"):
        TrainBatches(data, 1, 20, 0, packing="best-fit", mask_prompt=True).batch(1)


@pytest.fixture
def folder(tmp_path, byte_level):
    """Thirty short documents in shards of 100 tokens, two weighted parts."""
    for name, words in (("a", "river stone"), ("b", "light green water")):
        lines = [f'{{"text": "{words} {i} {"of " * (i % 7)}"}}\n' for i in range(30)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    prepare(DataOptions(paths, weights=[3, 1]), byte_level, tmp_path / "data", shard_tokens=100)
    return tmp_path / "data"


def test_prepared_documents_across_shards(folder, byte_level):
    data = TokenDataset.open(folder, "train")
    assert len(data.manifest.train.shards) > 4 and len(data.starts) == data.documents
    joined = data.slice(0, len(data))
    starts, stops = data.starts.bounds(np.arange(len(data.starts)))
    assert starts[0] == 0 and stops[-1] == len(data) and np.array_equal(starts[1:], stops[:-1])
    text = [byte_level.decode(joined[a:b].tolist()) for a, b in zip(starts, stops, strict=True)]
    assert all(t.startswith(("river stone ", "light green water ")) for t in text)
    numbers = np.searchsorted(starts, np.arange(len(data)), side="right") - 1
    for a, b in ((0, len(data)), (95, 205), (starts[3], stops[3]), (7, 8)):
        assert np.array_equal(data.segment_ids(a, b), numbers[a:b] - numbers[a])
    shuffled = np.random.default_rng(0).permutation(len(starts))
    assert np.array_equal(data.starts.bounds(shuffled)[0], starts[shuffled])


def test_prepared_parts_have_their_weights(folder, byte_level):
    data = TokenDataset.open(folder, "train")
    assert [(p.name, p.weight) for p in data.parts] == [("a.jsonl", 0.75), ("b.jsonl", 0.25)]
    assert sum(len(p.data) for p in data.parts) == len(data)
    batches = TrainBatches(data, 10, 16, 0, packing="best-fit")
    parts, rows = zip(*map(batches._mixture.locate, range(BLOCK_ROWS)), strict=True)
    spans = [batches._packings[part].spans(row) for part, row in zip(parts, rows, strict=True)]
    tokens = [sum(span.stop - span.start for span in row) for row in spans]
    of_a = sum(n for part, n in zip(parts, tokens, strict=True) if part == 0)
    assert of_a / sum(tokens) == pytest.approx(0.75, abs=0.01)
    assert batches.padding == pytest.approx(1 - sum(tokens) / (17 * BLOCK_ROWS), abs=0.01)
    rows = TrainBatches(data, 10, 16, 0)
    assert sum(rows._mixture.locate(row)[0] == 0 for row in range(BLOCK_ROWS)) == 750
    assert set(batches.epochs(1)) == {"a.jsonl", "b.jsonl"}


@pytest.mark.parametrize(
    "content",
    [np.array([5, 3]), np.array([[0]]), np.array([0.0]), np.array([0, 10**6]), np.array([-1, 4]), b"", b"x" * 99],
)
def test_malformed_document_starts(folder, content):
    path = folder / "train-00000.idx.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    with pytest.raises(DataError, match="train-00000.idx.npy.*preparing the data again"):
        TrainBatches(TokenDataset.open(folder, "train"), 1, 16, 0, packing="best-fit")


def test_a_mask_of_another_size(tmp_path, byte_level):
    (tmp_path / "talks.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "river?"}, {"role": "assistant", "content": "stone"}]}\n' * 30
    )
    prepare(DataOptions([tmp_path / "talks.jsonl"]), byte_level, tmp_path / "data")
    data = TokenDataset.open(tmp_path / "data", "train")
    tokens, _, weights = TrainBatches(data, 1, 20, 0, mask_prompt=True).batch(0)
    end, user = (byte_level.special_tokens[f"<|{name}|>"] for name in ("end", "user"))
    assert 0 < weights.sum() < 20 and not weights[tokens[:, 1:] == user].any() and weights[tokens[:, 1:] == end].any()
    assert data.num_targets() == data.loss_mask(0, len(data)).sum()
    (tmp_path / "data/train-00000.mask.bin").write_bytes(b"\1")
    with pytest.raises(DataError, match="train-00000.mask.bin has 1 bytes"):
        TokenDataset.open(tmp_path / "data", "train").loss_mask(0, 1)
