"""Contexts: cache options, interrupts at any line, flat memory, cache files."""

import sys
import tracemalloc
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions, save_prompt_cache
from mlxlm.generation import Context, generate, generate_tokens, stream
from mlxlm.generation.context import UNLIMITED, cache_identity
from mlxlm.generation.drafters import PromptLookup
from mlxlm.generation.speculative import SpeculativeDecoder
from mlxlm.model import Decoder
from mlxlm.utils.errors import CheckpointError, GenerationError
from tests.generation.reference_decoding import PROMPT, greedy, mlx_lm_model, naive

KINDS = [KVOptions(), KVOptions.of(size=16, keep=2), KVOptions.of(size=1000)]


def is_consistent(context):
    """Whether every layer holds as many tokens as the context."""
    return {cache.offset for cache in context.caches} <= {len(context.ids)}


@settings(max_examples=8)
@given(
    st.sampled_from(KINDS),
    st.lists(st.integers(1, 299), min_size=1, max_size=50),
    st.integers(1, 40),
    st.integers(1, 20),
)
def test_the_prefill_step_size_changes_no_token(lm, kv, prompt, prefill_step_size, count):
    wanted = list(generate_tokens(Context(lm.model, kv), prompt, greedy, count, prefill_step_size=1))
    context = Context(lm.model, kv)
    assert list(generate_tokens(context, prompt, greedy, count, prefill_step_size=prefill_step_size)) == wanted
    assert is_consistent(context)
    if kv.size is None or kv.size > 100:
        assert wanted == naive(lm.model, prompt, count)


@settings(max_examples=5)
@given(st.data(), st.sampled_from(KINDS))
def test_a_trimmed_context_gives_the_tokens_of_a_new_one(lm, data, kv):
    context, text = Context(lm.model, kv), []
    for _ in range(4):
        kept = data.draw(st.integers(0, len(text)))
        text = text[:kept] + data.draw(st.lists(st.integers(1, 299), min_size=1, max_size=12))
        ids = generate_tokens(context, text, greedy, 9)
        taken = list(islice(ids, data.draw(st.integers(1, 9))))
        ids.close()
        assert is_consistent(context)
        assert taken == list(islice(generate_tokens(Context(lm.model, kv), text, greedy, 9), len(taken)))
        text = text + taken


def test_quantized_caches_bound_the_bytes_and_change_little(lm):
    config = lm.config.with_changes(hidden_size=64, head_dim=32, num_attention_heads=2, num_key_value_heads=1)
    model = Decoder(config)
    model.init_weights(1)
    sizes, texts = {}, {}
    for bits in (None, 8, 4):
        context = Context(model, KVOptions.of(bits=bits))
        texts[bits] = list(generate_tokens(context, PROMPT * 5, greedy, 10))
        sizes[bits] = sum(cache.nbytes for cache in context.caches)
    assert sizes[8] < 0.35 * sizes[None] and sizes[4] < 0.65 * sizes[8]
    assert texts[8] == texts[None]


class Blocking:
    """A sampler that must know every token before it draws the next one: never the same twice."""

    needs_last_token = True

    def __init__(self):
        self.seen, self.drawn = [], 0

    def accept(self, token):
        self.seen.append(token)

    def __call__(self, logits):
        assert len(self.seen) == self.drawn  # every token so far was observed
        self.drawn += 1
        banned = mx.zeros(logits.shape[-1], mx.bool_)
        for token in self.seen:
            banned = banned | (mx.arange(logits.shape[-1]) == token)
        return mx.argmax(mx.where(banned, -mx.inf, logits), axis=-1)


def test_a_sampler_that_needs_the_last_token_accepts_it_before_the_next_draw(lm):
    calls = []

    class Counting:
        layers = lm.model.layers

        def __call__(self, ids, cache=None):
            calls.append(ids.shape[1])
            return lm.model(ids, cache=cache)

    sampler, context = Blocking(), Context(Counting())
    ids = generate_tokens(context, PROMPT, sampler, 12)
    taken = [next(ids), next(ids)]
    # The pass over the token is on its way all the same; its draw isn't.
    assert calls == [len(PROMPT) - 1, 1, 1, 1] and sampler.drawn == 2
    taken += list(ids)
    assert sampler.seen == taken and len(set(taken)) == 12
    assert context.ids == PROMPT + taken[:-1] and is_consistent(context)


def interrupted_at(count, run):
    """Run with a KeyboardInterrupt before the count-th line of this package's code; whether it struck."""
    left = count

    def trace(frame, event, arg):
        nonlocal left
        name = frame.f_code.co_filename
        if "/mlxlm/generation/" not in name and "/mlxlm/cache/" not in name:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(previous)


@pytest.mark.parametrize("kv", [KVOptions(), KVOptions.of(size=16, keep=2)])
@settings(max_examples=10)
@given(count=st.integers(1, 2500))
def test_an_interrupt_at_any_line_leaves_a_consistent_context(lm, kv, count):
    context = Context(lm.model, kv)
    list(generate_tokens(context, PROMPT, greedy, 3))
    other = PROMPT[:7] + [50, 51, 52, 53]

    def run():
        list(generate_tokens(context, other, greedy, 12, prefill_step_size=2))

    interrupted_at(count, run)
    assert context.ids == [] or is_consistent(context)
    wanted = list(generate_tokens(Context(lm.model, kv), other, greedy, 6))
    assert list(generate_tokens(context, other, greedy, 6)) == wanted and is_consistent(context)


def test_memory_is_flat_with_a_rotating_cache(lm):
    ids = generate_tokens(Context(lm.model, KVOptions.of(size=64)), PROMPT, greedy, UNLIMITED)
    tracemalloc.start()
    try:
        list(islice(ids, 100))
        mx.synchronize()
        device, python = mx.get_active_memory(), tracemalloc.get_traced_memory()[0]
        list(islice(ids, 100))
        growth = tracemalloc.get_traced_memory()[0] - python
        mx.synchronize()
        assert mx.get_active_memory() <= device + 4096
        assert growth < 100 * 100  # ids; a step whose graph is held takes thousands
    finally:
        tracemalloc.stop()


def test_only_max_tokens_ends_a_text_with_a_rotating_cache(lm):
    result = generate(lm, [1] * 200, kv=KVOptions.of(size=32), max_tokens=20, temperature=0)
    assert (len(result.tokens), result.finish_reason, result.prompt_tokens) == (20, "length", 200)


def test_learned_positions_end_with_a_rotating_cache(lm):
    config = lm.config.with_changes(positions="learned", max_position_embeddings=40)
    model = Decoder(config)
    model.init_weights(2)
    learned = replace(lm, model=model, config=config)
    result = generate(learned, [1] * 30, kv=KVOptions.of(size=20, keep=0), max_tokens=None, temperature=0)
    assert (len(result.tokens), result.finish_reason) == (10, "context")


def test_a_rotating_cache_larger_than_the_context_is_refused(lm):
    with pytest.raises(GenerationError, match=r"129 tokens is more than the model's context of 128.*try: .*128"):
        stream(lm, "x", kv=KVOptions.of(size=129))


def test_invalid_cache_settings(lm):
    with pytest.raises(GenerationError, match="kv is 8"):
        Context(lm.model, 8)


@pytest.mark.parametrize("kv", KINDS)
def test_concurrent_texts_need_two_contexts(lm, kv):
    """In step, with prompts of the same length that begin alike: nothing but the changes tells them apart."""
    context, other = Context(lm.model, kv), [*PROMPT[:-1], 65]
    alone = list(generate_tokens(Context(lm.model, kv), other, greedy, 5))
    first, second = generate_tokens(context, PROMPT, greedy, 5), generate_tokens(context, other, greedy, 5)
    next(first)
    found = [next(second)]
    with pytest.raises(GenerationError, match="another text has used this context.*a context for each"):
        next(first)
    assert found + list(second) == alone and is_consistent(context)


def test_a_text_keeps_its_own_statistics(lm):
    speculation = SpeculativeDecoder(PromptLookup())
    options = {"speculation": speculation, "temperature": 0, "max_tokens": 8}
    first = generate(lm, PROMPT, **options)
    stats = first.speculation
    second = generate(lm, PROMPT, **options)
    assert first.speculation is stats and second.speculation is speculation.stats is not stats


def test_a_window_can_be_trimmed_by_an_answer(lm):
    """However full the buffers are, a hundred tokens can be taken back, and the text isn't read again."""
    config = lm.config.with_changes(sliding_window=400, max_position_embeddings=4000, num_hidden_layers=1)
    context, ids = Context(Decoder(config)), [1 + i % 250 for i in range(1500)]
    context.read(ids[:900])
    for end in range(920, 1300, 40):
        context.read(ids[len(context) : end], prefill_step_size=10)
        assert context.trim_to_prefix(ids[: end - 99]) == end - 100


@pytest.mark.parametrize("kv", KINDS)
def test_a_context_is_continued_from_a_file(lm, tmp_path, kv):
    context = Context(lm.model, kv)
    generated = list(generate_tokens(context, PROMPT, greedy, 30))
    path = tmp_path / "prompt.safetensors"
    context.save(path, lm)
    longer = [*PROMPT, *generated, 50, 51]
    wanted = list(generate_tokens(context, longer, greedy, 9))

    read = []

    class Counting:
        layers, config, parameters = lm.model.layers, lm.config, lm.model.parameters

        def __call__(self, ids, cache=None):
            read.append(ids.shape[1])
            return lm.model(ids, cache=cache)

    again = Context(lm.model, kv)
    assert again.load(path, lm) == len(PROMPT) + 29
    again.model = Counting()
    assert list(generate_tokens(again, longer, greedy, 9)) == wanted
    assert sum(read) == 1 + 2 + 8  # the last token, the new ones, and what is generated


def test_files_of_other_models_are_refused(lm, tmp_path):
    context = Context(lm.model)
    list(generate_tokens(context, PROMPT, greedy, 3))
    path = tmp_path / "cache.safetensors"
    context.save(path, lm)
    other = Decoder(lm.config)
    other.init_weights(9)
    with pytest.raises(CheckpointError, match="another model"):
        Context(other).load(path, replace(lm, model=other))
    from mlxlm.tokenizer import train

    fewer = replace(lm, tokenizer=train(["one two three four five six seven"], 265))
    held = Context(lm.model)
    list(generate_tokens(held, PROMPT[:3], greedy, 2))
    with pytest.raises(CheckpointError, match="another tokenizer"):
        held.load(path, fewer)
    assert len(held) == 4 and is_consistent(held)
    rotating = Context(lm.model, KVOptions.of(size=16))
    with pytest.raises(CheckpointError, match="to hold all tokens, not 16 tokens of which the first 4 stay"):
        rotating.load(path, lm)
    with pytest.raises(CheckpointError, match="exists"):
        context.save(path, lm)
    context.save(path, lm, replace=True)
    longrope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    scaling = {**longrope, "original_max_position_embeddings": 30}
    changing = Context(Decoder(lm.config.with_changes(rope_scaling=scaling)))
    changing.read(PROMPT)
    for i, factors in enumerate(({"long_factors": "maybe"}, {})):
        identity = cache_identity(lm, changing.kv) | factors
        save_prompt_cache(tmp_path / f"{i}.safetensors", changing.caches, changing.ids, identity)
        with pytest.raises(CheckpointError, match="doesn't say which factors"):
            changing.load(tmp_path / f"{i}.safetensors", lm)
    with pytest.raises(CheckpointError, match="without tokens"):
        Context(lm.model).save(tmp_path / "empty.safetensors", lm)


@pytest.mark.parametrize("kv", [KVOptions.of(size=16), KVOptions.of(bits="8,4"), KVOptions.of(size=24, bits=8)])
def test_architectures_of_mlx_lm_with_these_caches(kv):
    heads = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    rest = {"attention_bias": False, "mlp_bias": False, "rope_theta": 10000.0, "tie_word_embeddings": False}
    model = mlx_lm_model("helium", **heads, **rest, max_position_embeddings=128)
    context = Context(model, kv)
    wanted = list(generate_tokens(Context(model, kv), PROMPT * 4, greedy, 20))
    assert list(generate_tokens(context, PROMPT * 4, greedy, 20, prefill_step_size=5)) == wanted
    assert max(cache.size() for cache in context.caches) <= (kv.size or 63)
