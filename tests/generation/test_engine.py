"""The engine: requests from many threads, cancellation, limits, errors; every text is the one generated alone."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from mlxlm.backend.mlx import ON_CPU, mx, tree_flatten
from mlxlm.cache import PREFILL_STEP_SIZE, KVOptions
from mlxlm.generation import Engine, GenerationOptions, LoadedModel, QueueFullError, Request, Sampler, device_thread
from mlxlm.generation.decoding import Batch
from mlxlm.generation.drafters import DraftModel, PromptLookup
from mlxlm.generation.speculative import SpeculativeDecoder
from mlxlm.model import Decoder
from mlxlm.utils.errors import GenerationError
from tests.generation.fake_drafters import always, perturbed
from tests.generation.recording_model import TIMEOUT, recording
from tests.generation.texts import OPTIONS, SYSTEM, alone, request, same


def settle(engine):
    """Wait until the engine has nothing to do."""
    for _ in range(1000):
        device_thread.run(lambda: None)
        if not (engine.stats.running or engine.stats.waiting):
            return
    raise AssertionError(f"the engine doesn't end: {engine.stats}")


def test_requests_from_many_threads(lm):
    engine = Engine(lm)
    wanted = [request([5, 6, 7 + i], 12, seed=i) for i in range(32)]

    def generate(one):
        return engine.submit(one).result()

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(generate, wanted))
    for one, result in zip(wanted, found, strict=True):
        same(result, alone(lm, one))
    settle(engine)
    stats = engine.stats
    assert stats.generated_tokens == 32 * 12 and stats.prompt_tokens == 32 * 3
    assert stats.cached_tokens == sum(result.cached_tokens for result in found)
    assert stats.kv_bytes == 0 < stats.prefix_cache_bytes


def test_a_waiting_text_is_cancelled(lm):
    model = recording(lm)
    engine = Engine(model, batch_size=1)
    pause = model.model.pause_at(3)
    first, second, third = (engine.submit(request(prompt)) for prompt in ([5, 6], [50] * 9, [7, 8]))
    with pause:
        assert engine.stats.running == 1 and engine.stats.waiting == 2
        second.cancel()
        assert second.done and list(second) == [] and second.result().tokens == []
    assert len(first.result().tokens) == len(third.result().tokens) == 20
    assert max(columns for _, columns in model.model.calls) == 1  # its prompt wasn't read


def test_a_text_is_cancelled_while_its_prompt_is_read(lm):
    chunk = PREFILL_STEP_SIZE
    model = recording(lm, max_position_embeddings=4 * chunk)
    engine = Engine(model)
    pause = model.model.pause_at(1)
    stream = engine.submit(request([7] * (3 * chunk)))
    with pause:
        assert engine.stats.running == 1 and stream.num_read == chunk
        stream.cancel()
    settle(engine)
    assert model.model.calls == [(1, chunk)] * 2 and engine.stats.kv_bytes == 0
    assert stream.result().tokens == [] and stream.result().prompt_tokens == 3 * chunk


def test_one_of_several_prompts_is_cancelled_while_they_are_read(lm):
    model = recording(lm)
    engine = Engine(model)
    wanted = [request([5 + i, 6, 7, 8], seed=i) for i in range(3)]
    pause = model.model.pause_at(0)
    streams = device_thread.run(lambda: [engine.submit(one) for one in wanted])
    with pause:
        streams[1].cancel()
    for index in (0, 2):
        same(streams[index].result(), alone(lm, wanted[index]))
    settle(engine)
    assert streams[1].result().tokens == []


def test_a_text_is_cancelled_while_others_go_on(lm):
    model = recording(lm)
    engine = Engine(model)
    wanted = [request([5 + i, 6, 7, 8], 40, seed=i) for i in range(3)]
    pause = model.model.pause_at(9)
    streams = device_thread.run(lambda: [engine.submit(one) for one in wanted])
    with pause:
        streams[1].cancel()
    for index in (0, 2):
        same(streams[index].result(), alone(lm, wanted[index]))
    assert any(rows == 2 for rows, _ in model.model.calls)
    settle(engine)
    # What was generated of it is kept.
    tokens = alone(lm, wanted[1]).tokens
    assert engine.submit(request([*wanted[1].prompt, *tokens[:5], 9], 1)).result().cached_tokens >= 8


def test_at_most_max_waiting_texts_wait(lm):
    model = recording(lm)
    engine = Engine(model, batch_size=1, max_waiting=2)
    pause = model.model.pause_at(3)
    streams = [engine.submit(request([5, 6]))]
    with pause:
        streams += [engine.submit(request([5, 7 + i])) for i in range(2)]
        with pytest.raises(QueueFullError, match="2 texts wait already"):
            engine.submit(request([5, 9]))
        streams[1].cancel()
        # The place of a cancelled text is free when the engine has noticed.
    assert [len(stream.result().tokens) for stream in streams] == [20, 0, 20]
    assert len(engine.submit(request([5, 9])).result().tokens) == 20


def test_a_closed_engine(lm):
    model = recording(lm)
    engine = Engine(model, batch_size=2)
    pause = model.model.pause_at(5)
    streams = [engine.submit(request([5, 6 + i], 100)) for i in range(4)]
    closing = threading.Thread(target=engine.close)
    with pause:
        closing.start()
    closing.join(TIMEOUT)
    for stream in streams:
        with pytest.raises(GenerationError, match="the engine was closed"):
            stream.result()
    with pytest.raises(GenerationError, match="the engine is closed"):
        engine.submit(request([5, 6]))
    assert engine.stats.prefix_cache_bytes == engine.stats.kv_bytes == engine.stats.waiting == engine.stats.running == 0
    assert len(model.model.calls) <= 7
    engine.close()


def test_a_constraint_that_can_not_be_compiled(lm):
    engine = Engine(lm, max_waiting=3)
    good = [request([5, 6, 7], seed=1), request([5, 6, 8], seed=2, choice=["The fox", "dog"])]
    first = engine.submit(good[0])
    bad = engine.submit(request([5, 6], json_schema={"$ref": "#/nowhere"}))
    last = engine.submit(good[1])
    with pytest.raises(GenerationError, match="json_schema"):
        next(bad)
    same(first.result(), alone(lm, good[0]))
    same(last.result(), alone(lm, good[1]))
    assert engine.stats.waiting == 0


def test_engines_of_two_models_take_turns(lm):
    other = Decoder(lm.config)
    other.init_weights(seed=8)
    other = replace(lm, model=other)
    engines = [Engine(lm), Engine(other)]
    streams = [engine.submit(request([5, 6, 7 + i], 30)) for i in range(3) for engine in engines]
    for i, stream in enumerate(streams):
        same(stream.result(), alone((lm, other)[i % 2], request([5, 6, 7 + i // 2], 30)))


@pytest.mark.parametrize("drafts", [False, True])
def test_a_text_that_grows_across_the_factors_of_longrope_is_read_again(lm, drafts):
    """The same tokens as from a pass over the whole text for each."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4, "original_max_position_embeddings": 16}
    config = lm.config.with_changes(rope_scaling={"rope_type": "longrope", **factors})
    model = Decoder(config)
    model.load_weights(tree_flatten(lm.model.parameters()))
    engine = Engine(replace(lm, model=model, config=config), speculation=always(PromptLookup(), 4) if drafts else None)
    wanted = [request([5, 9, 5, 9, 5, 9 + i], 30, temperature=i, repetition_penalty=1 + i) for i in range(2)]
    streams = device_thread.run(lambda: [engine.submit(one) for one in wanted])
    for one, stream in zip(wanted, streams, strict=True):
        ids, sampler = list(one.prompt), Sampler(one.options, one.prompt, 3)
        for _ in range(30):
            ids.append(sampler(model(mx.array([ids]))[:, -1]).item())
        assert stream.result().tokens == ids[len(one.prompt) :]


# Every text is the one generated alone, also where rounding would decide between two tokens.


FILTERS = [
    {"temperature": 1.0, "top_k": 100, "top_p": 0.5, "min_p": 0.9},
    {"temperature": 0.7, "top_p": 0.3},
    {"temperature": 1.0, "top_k": 50, "xtc_probability": 0.5, "xtc_threshold": 0.01},
    {"temperature": 1.0, "typical_p": 0.5},
]


class ImpreciseModel(Decoder):
    """A model with logits close to each other, which differ when several rows or tokens are computed at once."""

    def __call__(self, ids, cache=None):
        logits = super().__call__(ids, cache=cache)
        return logits if ids.size == 1 else logits + mx.random.uniform(-0.0009, 0.0009, logits.shape)


@pytest.fixture(scope="module")
def imprecise(lm):
    config = lm.config.with_changes(hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32)
    model = ImpreciseModel(config)
    model.init_weights(seed=5)
    model.lm_head.weight = model.lm_head.weight * 0.2
    mx.eval(model.parameters())
    return LoadedModel(model, lm.tokenizer, config, lm.path)


def random_request(random, seed):
    shared = SYSTEM[: random.choice([0, 0, 20, 40])]
    prompt = [*shared, *(random.randrange(1, 300) for _ in range(random.randint(1, 20)))]
    options = {**random.choice(OPTIONS + FILTERS), "seed": seed, "max_tokens": random.choice([1, 2, 9, 25, 40])}
    return Request(prompt, GenerationOptions.of(**options))


def texts_at_random_times(engine, wanted, random):
    """The stream of each request, and how many tokens were read from those that were cancelled."""
    streams, cancelled = [], {}
    for one in wanted:
        streams.append(engine.submit(one))
        for _ in range(random.choice([0, 0, 0, 1, 3])):  # arrives later
            device_thread.run(lambda: None)
        if random.random() < 0.15:
            victim = random.randrange(len(streams))
            if victim not in cancelled and not streams[victim].done:
                cancelled[victim] = [chunk.token for _, chunk in zip(range(2), streams[victim], strict=False)]
                streams[victim].cancel()
    return streams, cancelled


def assert_all_as_alone(lm, engine, count, seed, kv=None):
    random_ = random.Random(seed)
    wanted = [random_request(random_, i) for i in range(count)]
    streams, cancelled = texts_at_random_times(engine, wanted, random_)
    for index, (one, stream) in enumerate(zip(wanted, streams, strict=True)):
        found, expected = stream.result(), alone(lm, one, kv)
        if found.finish_reason is None:
            assert index in cancelled and found.tokens == cancelled[index] == expected.tokens[: len(found.tokens)]
        else:
            same(found, expected)
    settle(engine)


@pytest.mark.parametrize(("batch_size", "count"), [(1, 4), (3, 9), (8, 16), (32, 40)])
def test_every_text_is_the_one_generated_alone(imprecise, batch_size, count, monkeypatch):
    decided_alone = []
    decide_alone = Batch._decide_alone
    monkeypatch.setattr(
        Batch, "_decide_alone", lambda *args, **kw: decided_alone.append(1) or decide_alone(*args, **kw)
    )
    engine = Engine(imprecise, batch_size=batch_size)
    assert_all_as_alone(imprecise, engine, count, batch_size)
    assert decided_alone or batch_size <= 8 or not ON_CPU


def test_every_text_is_the_one_generated_alone_with_quantized_caches(imprecise):
    kv = KVOptions.of(bits="8,4")
    assert_all_as_alone(imprecise, Engine(imprecise, kv=kv, batch_size=6), 8, 3, kv)


def test_every_text_is_the_one_generated_alone_with_rotating_caches(lm):
    kv = KVOptions.of(size=24, keep=2)
    assert_all_as_alone(lm, Engine(lm, kv=kv, batch_size=6), 8, 3, kv)


@pytest.mark.parametrize("kind", ["lookup", "draft"])
@pytest.mark.parametrize("kv", [KVOptions(), KVOptions.of(bits=8)], ids=str)
def test_every_text_is_the_one_generated_alone_with_speculation(imprecise, kind, kv):
    lm = imprecise
    draft = LoadedModel(perturbed(lm.model, 0.02), lm.tokenizer, lm.config, lm.path)
    speculation = always(PromptLookup() if kind == "lookup" else DraftModel(draft), 4)
    assert_all_as_alone(lm, Engine(lm, kv=kv, batch_size=6, speculation=speculation), 8, 5, kv)


def test_speculation_is_for_few_texts(lm):
    """More than four are decoded in a batch, without drafts."""
    speculation = SpeculativeDecoder(PromptLookup())
    engine = Engine(lm, speculation=speculation)
    wanted = [request([5, 6, 7 + i], 9, seed=i) for i in range(6)]
    streams = device_thread.run(lambda: [engine.submit(one) for one in wanted])
    results = [stream.result() for stream in streams]
    assert all(result.speculation is None for result in results)
    assert engine.submit(wanted[0]).result().speculation is not None
    for one, result in zip(wanted, results, strict=True):
        same(result, alone(lm, one))
