"""Batches of texts of similar length."""

import pytest

from mlxlm.cache import KVOptions
from mlxlm.generation import Engine, GenerationOptions, Request
from mlxlm.generation.kv_memory import KVMemory
from mlxlm.generation.running_batch import RunningBatch
from tests.generation.recording_model import recording
from tests.generation.test_batching import alone, same


def request(num_tokens, seed=0, max_tokens=30):
    options = GenerationOptions(temperature=1.0, seed=seed, max_tokens=max_tokens)
    return Request([7 + (seed + i) % 200 for i in range(num_tokens)], options, frozenset())


def submit_all(model, wanted, **options):
    """Submit requests, each of them in the second step after the one before."""
    engine = Engine(model, prefix_cache_bytes=0, **options)
    streams = [engine.submit(wanted[0])]
    for one in wanted[1:]:
        with model.model.pause_at(len(model.model.calls) + 2):
            streams.append(engine.submit(one))
    return streams


@pytest.fixture
def model(lm):
    return recording(lm, max_position_embeddings=8192)


@pytest.fixture
def long(model):
    """A number of tokens whose keys and values have more bytes than the weights."""
    memory = KVMemory(model, KVOptions(), 0)
    return next(n for n in range(100, 8000, 100) if memory.bytes_for(n - 100) > memory.weight_bytes)


@pytest.fixture
def rows(monkeypatch):
    """The rows of each step."""
    rows, step = [], RunningBatch.step
    monkeypatch.setattr(RunningBatch, "step", lambda self, *args: rows.append(self.rows) or step(self, *args))
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
    step = RunningBatch.step

    def fail(self, *args):
        if any(len(row.text) >= long + 5 for row in self.rows):
            raise RuntimeError("out of memory")
        return step(self, *args)

    monkeypatch.setattr(RunningBatch, "step", fail)
    wanted = [request(10), request(long, 1)]
    short, failing = submit_all(model, wanted)
    with pytest.raises(RuntimeError, match="out of memory"):
        failing.result()
    assert failing.num_generated == 5
    same(short.result(), alone(model, wanted[0]))
