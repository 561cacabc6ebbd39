"""Streams of the engine: iteration in threads and event loops, cancellation, results; stop strings."""

import asyncio
import gc
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxlm.generation import Engine, device_thread
from mlxlm.generation.stop_strings import StopStrings
from mlxlm.utils.errors import GenerationError
from tests.generation.recording_model import TIMEOUT, recording
from tests.generation.texts import request


@pytest.fixture
def model(lm):
    return recording(lm)


@pytest.fixture
def engine(model):
    with Engine(model) as engine:
        yield engine


@pytest.fixture(scope="module")
def wanted(lm):
    return Engine(lm).submit(request()).result()


def test_async_iteration_gives_the_same_chunks(engine, wanted):
    async def collect(stream):
        return [chunk async for chunk in stream]

    async def main():
        first, second = engine.submit(request()), engine.submit(request(seed=9))
        chunks, _ = await asyncio.gather(collect(first), collect(second))
        assert await first.wait() == first.result()
        return chunks, await second.wait()

    chunks, second = asyncio.run(main())
    assert [chunk.token for chunk in chunks] == wanted.tokens
    assert "".join(chunk.text for chunk in chunks) == wanted.text and chunks[-1].finish_reason == "length"
    assert second.tokens == engine.submit(request(seed=9)).result().tokens != wanted.tokens


def test_a_cancelled_wait_loses_no_chunk(engine, model, wanted):
    pause = model.model.pause_at(8)

    async def main():
        stream, chunks = engine.submit(request()), []

        async def collect():
            async for chunk in stream:
                chunks.append(chunk.token)

        task = asyncio.create_task(collect())
        await asyncio.to_thread(pause.reach)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert 0 <= len(chunks) < 8
        pause.resume()
        await collect()
        return chunks

    assert asyncio.run(main()) == wanted.tokens


def test_an_event_loop_may_end_before_its_text(engine, model, wanted):
    stream = engine.submit(request())
    pause = model.model.pause_at(8)

    async def main():
        task = asyncio.create_task(stream.wait())
        await asyncio.to_thread(pause.reach)
        task.cancel()

    asyncio.run(main())
    pause.resume()
    assert stream.result().tokens == wanted.tokens


def test_cancelling_ends_an_iteration_that_waits(engine, model):
    pause = model.model.pause_at(8)
    stream, chunks = engine.submit(request()), []
    thread = threading.Thread(target=lambda: chunks.extend(stream))
    thread.start()
    with pause:
        stream.cancel()  # the thread doesn't wait for the model
        thread.join(TIMEOUT)
        assert not thread.is_alive() and stream.done
    assert stream.result().tokens == [chunk.token for chunk in chunks] and len(chunks) < 8
    assert stream.result().finish_reason is None
    device_thread.run(lambda: None)
    assert engine.stats.running == 0 and len(model.model.calls) <= 10


def test_cancelling_ends_an_async_iteration_that_waits(engine, model):
    pause = model.model.pause_at(8)

    async def main():
        stream = engine.submit(request())

        async def cancel():
            await asyncio.to_thread(pause.reach)
            stream.cancel()

        task = asyncio.create_task(cancel())
        chunks = [chunk async for chunk in stream]
        await task
        pause.resume()
        assert len(chunks) < 8 and (await stream.wait()).tokens == [chunk.token for chunk in chunks]

    asyncio.run(main())


def test_cancelling_at_the_end_changes_nothing(engine, wanted):
    stream = engine.submit(request())
    list(stream)
    stream.cancel()
    assert stream.result().tokens == wanted.tokens and stream.result().finish_reason == "length"


def test_dropping_a_stream_frees_its_row(engine, model):
    pause = model.model.pause_at(8)
    stream = engine.submit(request())
    with pause:
        assert engine.stats.running == 1
        del stream
        gc.collect()
    device_thread.run(lambda: None)
    assert engine.stats.running == 0 and len(model.model.calls) <= 10


def test_progress_of_prompt_and_text(lm):
    read = []
    model = recording(lm, max_position_embeddings=4096)
    engine = Engine(model, prefix_cache_bytes=0)
    stream = engine.submit(request([1 + i % 250 for i in range(1200)]), on_prefill=read.append)
    first = next(stream)
    assert read == [0, 512, 1024, 1199] and stream.num_read == 1199
    assert [first, *stream] and stream.num_generated == 20 and stream.seed == 3


def test_seeds_are_drawn(engine):
    first, second = (engine.submit(request(seed=None, max_tokens=2)) for _ in range(2))
    assert first.seed == first.result().seed != second.seed == second.result().seed


def test_done_callbacks(engine, model):
    pause, ended = model.model.pause_at(3), threading.Event()
    stream = engine.submit(request())
    with pause:
        stream.add_done_callback(ended.set)
        assert not ended.is_set() and not stream.done
    assert ended.wait(TIMEOUT) and stream.done
    calls = []
    stream.add_done_callback(lambda: calls.append(1))
    assert calls == [1]


def test_errors_are_raised_wherever_the_text_is_awaited(engine):
    stream = engine.submit(request(regex="(unclosed"))

    async def iterate():
        return [chunk async for chunk in stream]

    for use in (
        stream.result,
        lambda: list(stream),
        lambda: asyncio.run(stream.wait()),
        lambda: asyncio.run(iterate()),
    ):
        with pytest.raises(GenerationError, match="regex"):
            use()
    assert stream.partial_result().tokens == []


letters = st.text(alphabet="abc", max_size=30)
stop_lists = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=3)


def cut(text, stops):
    """The text before the stop string that is completed first; the longest of those, if several are."""
    for end in range(1, len(text) + 1):
        lengths = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if lengths:
            return text[: end - max(lengths)]
    return text


@given(letters, stop_lists, st.lists(st.integers(1, 5)))
def test_text_before_the_stop_string(text, stops, sizes):
    matcher = StopStrings(stops)
    wanted = cut(text, stops)
    emitted, flush = "", text
    for size in [*sizes, len(text) + 1]:
        emitted += matcher.push(flush[:size])
        flush = flush[size:]
        assert wanted.startswith(emitted)
    assert matcher.matched == (wanted != text)
    assert emitted + matcher.flush() == wanted


@given(letters, stop_lists)
def test_only_the_start_of_a_stop_string_is_buffered(text, stops):
    matcher = StopStrings(stops)
    held = text[len(matcher.push(text)) :]
    assert matcher.matched or not held or any(stop.startswith(held) and stop != held for stop in stops)
