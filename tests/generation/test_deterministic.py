"""Deterministic texts on a GPU, whose rounding depends on how many tokens a pass computes: here, so does the model."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx, nn
from mlxlm.cache import PREFILL_STEP_SIZE, KVOptions
from mlxlm.generation import Engine, GenerationOptions, Request, device_thread, scheduler
from mlxlm.generation.drafters import PromptLookup
from tests.generation.fake_drafters import always
from tests.generation.recording_model import recording
from tests.generation.texts import OPTIONS, SYSTEM, alone, same


class ShapeDependentEmbedding(nn.Module):
    """Embeddings that depend on the number of tokens, and so do all keys, values and logits."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def __call__(self, tokens):
        return self.embedding(tokens) * (1 + tokens.size % 7 / 7)


@pytest.fixture(scope="module")
def gpu(lm):
    """A model that computes as on a GPU, in bfloat16."""
    lm = recording(lm, max_position_embeddings=4 * PREFILL_STEP_SIZE)
    lm.model.set_dtype(mx.bfloat16)
    lm.model.model.embed_tokens = ShapeDependentEmbedding(lm.model.model.embed_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "margin_for", lambda kv: None)
        yield lm


def request(prompt, max_tokens=12, **options):
    options = {"temperature": 1.0, **options, "max_tokens": max_tokens}
    return Request(prompt, GenerationOptions.of(**options), frozenset())


def submit_all(engine, requests):
    """Submit requests that are all there before the next step."""
    return device_thread.run(lambda: [engine.submit(one) for one in requests])


prompts = st.builds(
    lambda prefix, tail: SYSTEM[:prefix] + tail,
    st.sampled_from([0, 20, 40]), st.lists(st.integers(1, 299), min_size=1, max_size=30),
)  # fmt: skip
requests = st.builds(
    lambda prompt, options, seed, on, n: request(prompt, n, **{**options, "seed": seed, "deterministic": on}),
    prompts, st.sampled_from(OPTIONS), st.integers(0, 3), st.booleans(), st.integers(1, 12),
)  # fmt: skip


@settings(max_examples=15)
@given(st.lists(requests, min_size=2, max_size=9), st.sampled_from([2, 8]), st.randoms(use_true_random=False))
def test_a_deterministic_text_is_the_one_generated_alone(gpu, wanted, batch_size, rng):
    for kv in (KVOptions(), KVOptions.of(size=24, keep=2)):
        engine, streams = Engine(gpu, kv=kv, batch_size=batch_size), []
        for one in wanted:
            streams.append(engine.submit(one))
            for _ in range(rng.choice([0, 0, 3])):  # arrives later
                device_thread.run(lambda: None)
        for one, stream in zip(wanted, streams, strict=True):
            result = stream.result()
            if one.options.is_deterministic:
                same(result, alone(gpu, one, kv))


def test_other_texts_of_this_model_depend_on_what_is_beside_them(gpu):
    wanted = [request([5, 6, 7 + i], 20, seed=i, deterministic=False) for i in range(4)]
    found = [stream.result().tokens for stream in submit_all(Engine(gpu), wanted)]
    assert found != [alone(gpu, one).tokens for one in wanted]


def test_a_long_prompt_is_read_in_the_same_chunks_beside_others(gpu):
    engine, wanted = Engine(gpu), request(random.Random(0).choices(range(300), k=5 * PREFILL_STEP_SIZE // 2), seed=1)
    running = engine.submit(request([5, 6], 40))
    next(running)
    same(engine.submit(wanted).result(), alone(gpu, wanted))
    assert len(running.result().tokens) == 40
    assert gpu.model.calls.count((1, PREFILL_STEP_SIZE)) == 4


def test_a_repeated_request_has_the_same_text(gpu):
    engine, wanted = Engine(gpu), request(SYSTEM, seed=1)
    first, second = (engine.submit(wanted).result() for _ in range(2))
    same(first, second)
    assert second.cached_tokens == 0 < engine.submit(request(SYSTEM, 1)).result().cached_tokens  # another request's


def test_few_are_decoded_at_once_and_do_not_hold_up_others(gpu, monkeypatch):
    engine, most = Engine(gpu, batch_size=8), 0
    step = engine._scheduler.step

    def counting_step(*args):
        nonlocal most
        busy = step(*args)
        most = max(most, len(engine._scheduler._batches._single))
        return busy

    monkeypatch.setattr(engine._scheduler, "step", counting_step)
    wanted = [*(request([5, 6 + i], 20, seed=i) for i in range(9)), request([5, 6, 7], 5)]
    ended = []
    streams = submit_all(engine, wanted)
    for number, stream in enumerate(streams):
        stream.add_done_callback(lambda number=number: ended.append(number))
    for one, stream in zip(wanted[:-1], streams[:-1], strict=True):
        same(stream.result(), alone(gpu, one))
    assert most == scheduler.MAX_SINGLE_ROWS and ended[0] == 9


def test_speculation_is_for_other_texts(gpu):
    engine = Engine(gpu, speculation=always(PromptLookup(), 4), prefix_cache_bytes=0)
    for deterministic in (True, False):
        result = engine.submit(request([5, 6, 7] * 5, 40, temperature=0, deterministic=deterministic)).result()
        assert (result.speculation is None) == deterministic
    assert result.speculation.accepted > 0 == result.speculation.num_redecoded


@pytest.mark.parametrize(
    ("options", "wanted", "after_with_seed"),
    [
        ({}, False, False),
        ({"seed": 0}, True, False),
        ({"seed": 0, "deterministic": False}, False, False),
        ({"deterministic": True}, True, True),
        ({"seed": 0, "deterministic": True}, True, True),
    ],
)
def test_a_seed_of_its_own_makes_a_text_deterministic(options, wanted, after_with_seed):
    options = GenerationOptions(**options)
    assert options.is_deterministic == wanted
    assert options.with_seed(5).is_deterministic == after_with_seed and options.with_seed(5).seed == 5
    assert Request([5], options).sample("1", 0).options.is_deterministic == after_with_seed
