"""Memory of keys and values: how much texts need, and what happens if there is too little."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxlm.backend import platform
from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.cache import PREFILL_STEP_SIZE, KVOptions
from mlxlm.families import load_preset
from mlxlm.generation import Context, Engine, device_thread
from mlxlm.generation.batches import Batches
from mlxlm.generation.decoding import Batch
from mlxlm.generation.drafters import PromptLookup
from mlxlm.generation.kv_memory import (
    KVMemory,
    StepMemory,
    activation_bytes,
    default_max_kv_bytes,
    prefill_step_size,
)
from mlxlm.generation.prefill import Prefill
from mlxlm.generation.speculative import SpeculativeDecoder
from mlxlm.model import Decoder
from mlxlm.utils.errors import MemoryLimitError, PromptTooLongError
from tests.generation.recording_model import recording
from tests.generation.texts import alone, request


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Caches grow by 8 positions, so that the memory of short texts differs."""
    monkeypatch.setattr("mlxlm.cache.kv_cache.STEP", 8)
    monkeypatch.setattr("mlxlm.generation.kv_memory._HEADROOM", 8)


def test_max_tokens_is_the_largest_number_that_fits(lm):
    for max_bytes in (0, 100_000, 1 << 30):
        memory = KVMemory(lm, KVOptions(), max_bytes)
        n = memory.max_tokens(max_bytes)
        assert n == 0 or memory.reserved_bytes(n) <= max_bytes
        assert memory.reserved_bytes(n + 1) > max_bytes


@pytest.mark.parametrize("weight_bytes", [0, 1 << 30, 9 << 29, 1 << 50])
def test_the_default_leaves_room_for_weights_activations_and_others(weight_bytes):
    norm = mx.zeros(1, mx.float16)
    lm = SimpleNamespace(config=load_preset("1b"), weights=[norm], weight_bytes=weight_bytes)
    room, size = 0.75 * platform.total_memory() - weight_bytes, prefill_step_size(lm)
    if mx.metal.is_available():
        room = mx.device_info()["max_recommended_working_set_size"] - (512 << 20) - weight_bytes
        assert activation_bytes(lm, size) < room / 4 or size == 512
        assert size == PREFILL_STEP_SIZE or activation_bytes(lm, 2 * size) > room / 4
        room -= activation_bytes(lm, size)
        assert 3 < activation_bytes(lm, size) / (size * 2 * 3 * lm.config.intermediate_size) < 6
    assert default_max_kv_bytes(lm) == max(256 << 20, int(room))


@pytest.mark.skipif(not ON_CPU, reason="a simulated GPU computes attention as a CPU does")
def test_activations_of_a_chunk_are_as_many_as_were_counted(lm):
    config = lm.config.with_changes(
        hidden_size=256, intermediate_size=2048, num_attention_heads=1, num_key_value_heads=1, head_dim=256,
        max_position_embeddings=PREFILL_STEP_SIZE,
    )  # fmt: skip
    model = Decoder(config)
    model.init_weights(seed=1)
    mx.eval(model.parameters())
    context, before = Context(model), mx.get_active_memory()
    mx.reset_peak_memory()
    context.read([7] * PREFILL_STEP_SIZE)
    taken = mx.get_peak_memory() - before - sum(cache.nbytes for cache in context.caches)
    assert 0.6 < taken / activation_bytes(replace(lm, model=model, config=config), PREFILL_STEP_SIZE) < 1


def test_a_prompt_that_can_not_fit_is_refused(lm):
    engine = Engine(lm, max_kv_bytes=KVMemory(lm, KVOptions(), 0).reserved_bytes(48))
    assert len(engine.submit(request([7] * 47, 1)).result().tokens) == 1
    with pytest.raises(
        PromptTooLongError, match=r"too long: 48 tokens, and memory has room for 47 \(try: fewer tokens"
    ):
        engine.submit(request([7] * 48))


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_text_ends_where_memory_does(lm, deterministic):
    engine = Engine(lm, max_kv_bytes=KVMemory(lm, KVOptions(), 0).reserved_bytes(48))
    wanted = request([7] * 40, 60, deterministic=deterministic)
    result = engine.submit(wanted).result()
    assert result.tokens == alone(lm, wanted).tokens[:8] and result.finish_reason == "context"


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_text_fails_if_its_memory_is_given_to_another_model(lm, deterministic):
    """So does a prompt that has no room until that is unloaded."""
    engine, large = Engine(lm), 1 << 30
    kv_bytes, tokens = KVMemory(lm, KVOptions(), 0).reserved_bytes(48), Prefill.default_max_tokens(lm)
    sizes = range(kv_bytes, large, 1000)
    small = next(n for n in sizes if StepMemory.divide(lm, n, engine.batch_size, tokens).kv_bytes >= kv_bytes)
    engine.limit_memory(large)
    stream = engine.submit(request([7] * 40, 60, deterministic=deterministic))
    next(stream)
    engine.limit_memory(small, large)
    with pytest.raises(MemoryLimitError, match="memory has room for the keys and values of .* tokens now"):
        list(stream)
    with pytest.raises(MemoryLimitError, match="while other models are loaded"):
        engine.submit(request([7] * 100))
    engine.limit_memory(large)
    assert len(engine.submit(request([7] * 100, 9)).result().tokens) == 9


def test_texts_wait_for_memory(lm, monkeypatch):
    """Two have room beside each other, however long they become."""
    monkeypatch.setattr("mlxlm.generation.kv_memory._HEADROOM", 1000)
    model = recording(lm)
    memory = KVMemory(lm, KVOptions(), 0)
    engine = Engine(model, max_kv_bytes=memory.reserved_bytes(63, 2), prefix_cache_bytes=0)
    wanted = [request([5, 6, 7 + i], 60, seed=i) for i in range(5)]
    pause = model.model.pause_at(0)
    streams = [engine.submit(one) for one in wanted]
    pause.reach()
    pause.resume()
    for one, stream in zip(wanted, streams, strict=True):
        assert stream.result().tokens == alone(lm, one).tokens
    assert max(rows for rows, columns in model.model.calls if columns == 1) == 2


OPTIONS = [
    {"temperature": 0},
    {"temperature": 1.0, "repetition_penalty": 1.3, "logprobs": 1},
    {"temperature": 0.9, "top_k": 20, "dry_multiplier": 0.8},
    {"temperature": 1.0, "regex": "[a-z ]{90,}"},
]


@pytest.mark.parametrize("kv", [KVOptions(), KVOptions.of(size=30, keep=2)], ids=str)
@pytest.mark.parametrize("prefix_cache_bytes", [0, None])
def test_interrupted_texts_are_those_generated_alone(lm, monkeypatch, kv, prefix_cache_bytes):
    """Four begin together, and memory has room for the whole of two."""
    taken_out = []
    take_out = Batch.take_out
    monkeypatch.setattr(Batch, "take_out", lambda self, row: taken_out.append(row) or take_out(self, row))
    memory = KVMemory(lm, kv, 0)
    room = memory.reserved_bytes(100, 2)
    engine = Engine(lm, kv=kv, max_kv_bytes=room, prefix_cache_bytes=prefix_cache_bytes)
    wanted = [request([5, 6, 7 + i], 80, **{**options, "seed": i}) for i, options in enumerate(OPTIONS)]
    streams = device_thread.run(lambda: [engine.submit(one) for one in wanted])
    for one, stream in zip(wanted, streams, strict=True):
        result, expected = stream.result(), alone(lm, one, kv)
        assert (result.tokens, result.text, result.finish_reason) == (
            expected.tokens,
            expected.text,
            expected.finish_reason,
        )
        if expected.logprobs:
            assert [entry.token for entry in result.logprobs] == [entry.token for entry in expected.logprobs]
    assert taken_out
    assert engine.stats.waiting == 0


prompts = st.tuples(st.integers(0, 3), st.integers(1, 60), st.integers(1, 20), st.booleans())


@pytest.mark.parametrize("kv", [KVOptions(), KVOptions.of(size=30, keep=2)], ids=str)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wanted=st.lists(prompts, min_size=2, max_size=8), tokens=st.integers(80, 300), seed=st.integers(0, 99))
def test_texts_and_prefix_cache_never_take_more_than_the_limit(lm, monkeypatch, kv, wanted, tokens, seed):
    """Whatever begins, ends, is cancelled or interrupted; and each text is the one that its request gives alone."""
    monkeypatch.setattr("mlxlm.cache.kv_cache.STEP", 8)
    max_bytes = KVMemory(lm, kv, 0).reserved_bytes(tokens)
    taken, step = [], Batches.step

    def measure(batches, on_finish, max_padding):
        scheduler = on_finish.__self__
        reading = [reading.context.caches for reading in scheduler._reading if reading.context]
        parts = scheduler._prefix_cache.nbytes, batches.nbytes, sum(c.nbytes for caches in reading for c in caches)
        taken.append(sum(parts))
        return step(batches, on_finish, max_padding)

    monkeypatch.setattr(Batches, "step", measure)
    engine, rng = Engine(lm, kv=kv, max_kv_bytes=max_bytes), random.Random(seed)
    requests = [request([first, *range(100, 100 + n)], size, seed=rng.randrange(9)) for first, n, size, _ in wanted]
    streams = []
    for one, (*_, is_cancelled) in zip(requests, wanted, strict=True):
        streams.append(engine.submit(one))
        if is_cancelled:
            next(streams[-1])
            streams[-1].cancel()
    for one, stream, (*_, is_cancelled) in zip(requests, streams, wanted, strict=True):
        if not is_cancelled:
            assert stream.result().tokens == alone(lm, one, kv).tokens
    assert max(taken) <= max_bytes


def test_an_interrupted_text_goes_on_with_speculation(lm):
    """Six begin in a batch; the last to end has no text beside it, and drafts."""
    room = KVMemory(lm, KVOptions(), 0).reserved_bytes(90)
    engine = Engine(lm, max_kv_bytes=room, speculation=SpeculativeDecoder(PromptLookup()))
    wanted = [request([5, 6, 7 + i], 60, seed=i) for i in range(6)]
    streams = device_thread.run(lambda: [engine.submit(one) for one in wanted])
    results = [stream.result() for stream in streams]
    assert [result.tokens for result in results] == [alone(lm, one).tokens for one in wanted]
    assert any(result.speculation for result in results) and all(result.cached_tokens <= 2 for result in results)
