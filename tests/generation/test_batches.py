"""Batches of texts of similar length."""

import pytest

from mlxlm.cache import KVCache, KVOptions
from mlxlm.generation import Engine, device_thread
from mlxlm.generation.decoding import Batch
from mlxlm.generation.kv_memory import KVMemory
from tests.generation import texts
from tests.generation.recording_model import recording
from tests.generation.texts import alone, same


def request(num_tokens, seed=0, max_tokens=30):
    return texts.request([7 + (seed + i) % 200 for i in range(num_tokens)], max_tokens, seed=seed)


def submit_all(model, wanted, **options):
    """Submit requests, each of them in the second step after the one before."""
    engine = Engine(model, prefix_cache_bytes=0, **options)
    streams = [engine.submit(wanted[0])]
    for one in wanted[1:]:
        with model.model.pause_at(len(model.model.calls) + 2):
            streams.append(engine.submit(one))
    return streams


@pytest.fixture
def model(lm, monkeypatch):
    monkeypatch.setattr("mlxlm.generation.batches._OVERHEAD_BYTES", 0)
    monkeypatch.setattr("mlxlm.generation.batches._COPY_COST", 0)
    return recording(lm, max_position_embeddings=8192)


@pytest.fixture
def long(model):
    """A number of tokens whose keys and values have more bytes than the weights."""
    memory = KVMemory(model, KVOptions(), 0)
    return next(n for n in range(100, 8000, 100) if memory.bytes_for(n - 100) > memory.weight_bytes)


@pytest.fixture
def rows(monkeypatch):
    """The rows of each step."""
    rows, step = [], Batch.step
    monkeypatch.setattr(Batch, "step", lambda self, *args: rows.append(self.rows) or step(self, *args))
    return rows


def check(model, wanted, **options):
    for one, stream in zip(wanted, submit_all(model, wanted, **options), strict=True):
        same(stream.result(), alone(model, one))


def test_texts_of_similar_length_share_a_batch(model, rows):
    check(model, [request(10), request(14, 1), request(20, 2)])
    assert max(map(len, rows)) == 3


def test_a_long_text_has_its_own_batch(model, rows, long):
    check(model, [request(10), request(12, 1), request(long, 2)])
    assert max(map(len, rows)) == 2


def test_without_memory_for_padding_batches_stay_apart(model, rows, monkeypatch):
    monkeypatch.setattr("mlxlm.generation.kv_memory._HEADROOM", 30)
    room = KVMemory(model, KVOptions(), 0).reserved_bytes
    wanted = [request(10), request(90, 1)]
    check(model, wanted)
    assert max(map(len, rows)) == 2
    rows.clear()
    check(model, wanted, max_kv_bytes=room(40) + room(120))
    assert max(map(len, rows)) == 1


def test_an_error_ends_only_the_texts_of_its_batch(model, monkeypatch, long):
    step = Batch.step

    def fail(self, *args):
        if any(len(row) >= long + 5 for row in self.rows):
            raise RuntimeError("out of memory")
        return step(self, *args)

    monkeypatch.setattr(Batch, "step", fail)
    wanted = [request(10), request(long, 1)]
    short, failing = submit_all(model, wanted)
    with pytest.raises(RuntimeError, match="out of memory"):
        failing.result()
    assert failing.num_generated == 5
    same(short.result(), alone(model, wanted[0]))


@pytest.fixture
def copies(monkeypatch):
    """One entry for each time that the caches of a batch are copied."""
    copies, append, keep = [], Batch._append, Batch._keep
    monkeypatch.setattr(
        Batch, "_append", lambda self, *args: (self.rows and copies.append("merge"), append(self, *args))
    )
    monkeypatch.setattr(
        Batch,
        "_keep",
        lambda self, rows: (0 < len(rows) < len(self.rows) and copies.append("select"), keep(self, rows)),
    )
    return copies


def test_a_text_takes_the_place_of_one_that_has_finished(model, rows, copies, monkeypatch):
    monkeypatch.setattr("mlxlm.generation.batches._COPY_COST", 1000)
    replaced, replace_rows = [], KVCache.replace_rows
    monkeypatch.setattr(KVCache, "replace_rows", lambda self, *args: replaced.append(1) or replace_rows(self, *args))
    wanted = [request(30, 1, 60), request(30, 2, 5), request(10, 3, 5), request(12, 4, 30)]
    engine = Engine(model, prefix_cache_bytes=0)
    streams = device_thread.run(lambda: [engine.submit(one) for one in wanted[:2]])
    for one in wanted[2:]:
        next(stream for stream in streams[::-1] if stream.result())
        streams.append(engine.submit(one))
    for one, stream in zip(wanted, streams, strict=True):
        same(stream.result(), alone(model, one))
    assert max(map(len, rows)) == 2 and not copies
    assert len(replaced) == 2 * model.config.num_hidden_layers


def test_finished_rows_are_removed_when_they_have_taken_long_enough(model, rows, copies, monkeypatch):
    monkeypatch.setattr("mlxlm.generation.batches._COPY_COST", 8)
    wanted = [request(10, n, 60 if n < 2 else 5) for n in range(4)]
    engine = Engine(model, prefix_cache_bytes=0)
    streams = device_thread.run(lambda: [engine.submit(one) for one in wanted])
    for one, stream in zip(wanted, streams, strict=True):
        same(stream.result(), alone(model, one))
    sizes = [len(step) for step in rows]
    assert sizes.count(4) in range(12, 18) and sizes.count(2) > 40 and copies == ["select"]


def test_batches_are_merged_when_they_were_apart_for_long(model, rows, copies, monkeypatch):
    memory = KVMemory(model, KVOptions(), 0)
    monkeypatch.setattr("mlxlm.generation.batches._COPY_COST", 5 * memory.weight_bytes / memory.bytes_for(512))
    check(model, [request(10, max_tokens=60), request(14, 1, 60)])
    sizes = [len(step) for step in rows]
    assert 8 <= sizes.index(2) <= 20 and copies[0] == "merge"
