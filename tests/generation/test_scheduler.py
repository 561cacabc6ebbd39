"""The scheduler: texts pause while their readers are far behind; statistics."""

import asyncio
import threading
from itertools import islice
from queue import SimpleQueue

import pytest

from mlxlm.cache import KVOptions
from mlxlm.generation import Engine, device_thread, text
from mlxlm.generation.drafters import PromptLookup
from mlxlm.generation.kv_memory import KVMemory
from mlxlm.generation.scheduler import Scheduler
from mlxlm.generation.speculative import SpeculativeDecoder
from mlxlm.utils.errors import GenerationError
from tests.generation import texts
from tests.generation.recording_model import TIMEOUT
from tests.generation.texts import alone


def request(prompt=(5, 6, 7), max_tokens=100, **options):
    return texts.request(prompt, max_tokens, **options)


@pytest.fixture(autouse=True)
def few_unread_chunks(monkeypatch):
    monkeypatch.setattr(text, "MAX_UNREAD", 10)
    monkeypatch.setattr(text, "_RESUME_UNREAD", 5)


class Steps:
    """Counts the steps of engines, and reads first chunks between them."""

    def __init__(self, step):
        self._step, self._count = step, 0
        self._unread = []  # texts, and where their first chunks go

    def step(self, scheduler, *args):
        self._count += 1
        busy = self._step(scheduler, *args)
        for stream, first in [entry for entry in self._unread if entry[0].num_generated]:
            self._unread.remove((stream, first))
            first.put(next(stream))
        return busy

    def begin(self, engine, one):
        """Submit a request. Returns the stream, and its first chunk, which was taken before any other step."""
        first = SimpleQueue()

        def submit():
            self._unread.append((engine.submit(one), first))
            return self._unread[-1][0]

        return device_thread.run(submit), first.get(timeout=TIMEOUT)

    def wait(self):
        """Wait until the engine no longer steps."""
        for _ in range(5000):
            before = self._count
            for _ in range(3):
                device_thread.run(lambda: None)
            if self._count == before:
                return
        raise AssertionError("the engine doesn't stop to step")


@pytest.fixture
def steps(monkeypatch):
    steps = Steps(Scheduler.step)
    monkeypatch.setattr(Scheduler, "step", lambda *args: steps.step(*args))
    return steps


# Engines that decode a text in a batch, with what drops tokens of its cache, and by itself.
KINDS = [
    {},
    {"prefix_cache_bytes": 0},
    {"kv": KVOptions.of(size=24, keep=2)},
    {"kv": KVOptions.of(size=24, keep=2), "prefix_cache_bytes": 0},
    {"speculation": SpeculativeDecoder(PromptLookup())},
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: ", ".join(kind) or "default")
def test_a_text_pauses_while_its_reader_is_far_behind(lm, steps, kind):
    one = request(dry_multiplier=0.8, repetition_penalty=1.1)
    expected = alone(lm, one, kind.get("kv")).tokens
    engine = Engine(lm, **kind)
    stream, first = steps.begin(engine, one)
    tokens = [first.token]
    for _ in range(3):
        steps.wait()
        assert engine.stats.paused == 1 and engine.stats.running == engine.stats.waiting == 0
        assert 5 <= stream.num_generated - len(tokens) < 20
        tokens += [chunk.token for chunk in islice(stream, 15)]
    tokens += [chunk.token for chunk in stream]
    assert tokens == expected == stream.result().tokens
    steps.wait()
    assert engine.stats.paused == 0 and engine.stats.prompt_tokens == len(one.prompt)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[-1]], ids=lambda kind: ", ".join(kind) or "default")
def test_other_texts_go_on_beside_a_paused_one(lm, steps, kind):
    engine = Engine(lm, batch_size=1, **kind)
    stream, first = steps.begin(engine, request())
    steps.wait()
    others = [request([5, 6, 8 + i], 20, seed=i) for i in range(3)]
    for other, found in zip(others, [engine.submit(other) for other in others], strict=True):
        assert found.result().tokens == alone(lm, other).tokens
    assert engine.stats.paused == 1 and not stream.done
    assert [first.token, *(chunk.token for chunk in stream)] == alone(lm, request()).tokens


@pytest.mark.parametrize("awaited", ["result", "callback", "unread"])
def test_a_text_whose_end_is_awaited_does_not_pause(lm, steps, awaited):
    engine, ended = Engine(lm), threading.Event()
    if awaited == "unread":
        stream = engine.submit(request())
    else:
        stream, _ = steps.begin(engine, request())
        steps.wait()
        assert engine.stats.paused == 1
    if awaited == "callback":
        stream.add_done_callback(ended.set)
        assert ended.wait(TIMEOUT)
    assert stream.result().tokens == alone(lm, request()).tokens


def test_waiting_for_a_paused_text_in_an_event_loop(lm):
    engine = Engine(lm)

    async def main():
        stream = engine.submit(request())
        await anext(stream)
        return await stream.wait()

    assert asyncio.run(main()).tokens == alone(lm, request()).tokens


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[-1]], ids=lambda kind: ", ".join(kind) or "default")
def test_a_paused_text_is_cancelled_dropped_or_closed(lm, steps, kind):
    engine = Engine(lm, **kind)
    streams = [steps.begin(engine, request([5, 6, 8 + i]))[0] for i in range(3)]
    steps.wait()
    assert engine.stats.paused == 3
    streams[0].cancel()
    assert len(streams[0].result().tokens) == 1
    steps.wait()
    assert engine.stats.paused == 2
    del streams[1]
    steps.wait()
    assert engine.stats.paused == 1
    engine.close()
    assert engine.stats.paused == engine.stats.kv_bytes == 0
    with pytest.raises(GenerationError, match="the engine was closed"):
        list(streams[-1])
    steps.wait()


def test_texts_wait_for_the_memory_of_paused_ones(lm, steps):
    """A text that is decoded by itself keeps its memory while it pauses."""
    engine = Engine(
        lm,
        speculation=SpeculativeDecoder(PromptLookup()),
        max_kv_bytes=int(KVMemory(lm, KVOptions(), 0).reserved_bytes(20) * 1.5),
    )
    first, second = request(max_tokens=30), request([5, 9], 5)
    stream, chunk = steps.begin(engine, first)
    tokens = [chunk.token]
    steps.wait()
    waiting = engine.submit(second)
    steps.wait()  # doesn't try again and again
    assert engine.stats.waiting == engine.stats.paused == 1 and not waiting.done
    tokens += [chunk.token for chunk in stream]
    assert tokens == alone(lm, first).tokens and waiting.result().tokens == alone(lm, second).tokens


def test_an_interrupted_prompt_is_counted_once(lm, monkeypatch):
    monkeypatch.setattr("mlxlm.generation.kv_memory._HEADROOM", 8)
    engine = Engine(lm, max_kv_bytes=KVMemory(lm, KVOptions(), 0).reserved_bytes(100, 2), prefix_cache_bytes=0)
    wanted = [request([5, 6, 7 + i], 80, seed=i) for i in range(4)]
    streams = device_thread.run(lambda: [engine.submit(one) for one in wanted])
    results = [stream.result() for stream in streams]
    assert [result.tokens for result in results] == [alone(lm, one).tokens for one in wanted]
    assert engine.stats.prompt_tokens == 12
    assert engine.stats.cached_tokens == sum(result.cached_tokens for result in results)


def test_a_done_callback_that_fails_is_logged(lm, caplog):
    engine, ended = Engine(lm), threading.Event()
    wanted = [request(max_tokens=10), request([5, 6, 8], 40)]
    streams = [engine.submit(one) for one in wanted]

    def fail():
        raise ZeroDivisionError

    for callback in (fail, ended.set):
        streams[0].add_done_callback(callback)
    assert streams[1].result().tokens == alone(lm, wanted[1]).tokens
    assert ended.wait(TIMEOUT) and streams[0].result().tokens == alone(lm, wanted[0]).tokens
    assert "ZeroDivisionError" in caplog.text and "a done callback has failed" in caplog.text
    streams[0].add_done_callback(fail)  # also one that is called at once
