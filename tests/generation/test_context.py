"""Contexts: common prefixes, interrupts, cache files; texts with cache options."""

import tracemalloc
from dataclasses import replace
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm import generate, stream
from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions, save_prompt_cache
from mlxlm.generation import Context, greedy_tokens
from mlxlm.generation.context import UNLIMITED, cache_identity
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.generation.drafters import PromptLookup
from mlxlm.generation.speculative import SpeculativeDecoder
from mlxlm.model import Decoder
from mlxlm.tokenizer import train
from mlxlm.utils.errors import CheckpointError, GenerationError
from tests.generation.reference_decoding import PROMPT, STATE_SPACE, Counting, mlx_lm_model

KINDS = [KVOptions(), KVOptions.of(size=16, keep=2), KVOptions.of(size=1000)]


def is_consistent(context):
    """Whether every layer holds as many tokens as the context."""
    return {cache.offset for cache in context.caches} <= {len(context.ids)}


def next_logits(context, ids):
    """The logits after `ids`, read in chunks of 3 after what the context has of them."""
    context.read(ids[context.trim_to_prefix(ids) : -1], 3)
    assert context.ids == ids[:-1] and is_consistent(context)
    return context.model(mx.array([ids[-1:]]), cache=[cache.copy() for cache in context.caches])[0, -1]


@settings(max_examples=5)
@given(st.data(), st.sampled_from(KINDS))
def test_a_trimmed_context_is_as_a_new_one(lm, data, kv):
    context, text = Context(lm.model, kv), []
    for _ in range(4):
        kept = data.draw(st.integers(0, len(text)))
        text = text[:kept] + data.draw(st.lists(st.integers(1, 299), min_size=1, max_size=20))
        found, wanted = next_logits(context, text), next_logits(Context(lm.model, kv), text)
        assert mx.allclose(found, wanted, atol=1e-3)


def test_only_what_is_new_is_read(lm):
    context = Context(Counting(lm.model))
    context.read(PROMPT)
    assert context.trim_to_prefix(PROMPT) == len(PROMPT) - 1  # its last token is read again for its logits
    assert context.trim_to_prefix([*PROMPT[:7], 50, 51]) == 7 and context.ids == PROMPT[:7] and is_consistent(context)
    assert context.model.calls == [len(PROMPT)]


def test_caches_that_cannot_be_trimmed_are_emptied():
    context = Context(mlx_lm_model("mamba", **STATE_SPACE))
    context.read(PROMPT)
    assert context.trim_to_prefix([*PROMPT, 50]) == len(PROMPT)
    assert context.trim_to_prefix([*PROMPT[:6], 3, 4]) == 0 and context.ids == []


def test_an_interrupt_in_a_chunk_empties_the_context(lm):
    class Interrupted(Counting):
        def __call__(self, ids, cache=None):
            raise KeyboardInterrupt

    context = Context(lm.model)
    context.read(PROMPT[:4])
    context.model = Interrupted(lm.model)
    with pytest.raises(KeyboardInterrupt):
        context.read(PROMPT[4:])
    context.model = lm.model
    assert context.ids == [] and context.trim_to_prefix(PROMPT) == 0
    context.read(PROMPT)
    assert context.ids == PROMPT and is_consistent(context)


def test_memory_is_flat_with_a_rotating_cache(lm):
    ids = greedy_tokens(DecodeStep(lm.model), PROMPT, UNLIMITED, kv=KVOptions.of(size=64))
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
    context, text = Context(lm.model, kv), [1 + i % 250 for i in range(40)]
    context.read(text, 4)
    path = tmp_path / "prompt.safetensors"
    context.save(path, lm)
    again = Context(lm.model, kv)
    assert again.load(path, lm) == 40
    counting = again.model = Counting(lm.model)
    longer = [*text, 50, 51]
    assert mx.array_equal(next_logits(again, longer), next_logits(context, longer))
    assert counting.calls == [1, 1]


def test_files_of_other_models_are_refused(lm, tmp_path):
    context = Context(lm.model)
    context.read(PROMPT)
    path = tmp_path / "cache.safetensors"
    context.save(path, lm)
    other = Decoder(lm.config)
    other.init_weights(9)
    with pytest.raises(CheckpointError, match="another model"):
        Context(other).load(path, replace(lm, model=other))
    fewer = replace(lm, tokenizer=train(["one two three four five six seven"], 265))
    held = Context(lm.model)
    held.read(PROMPT[:4])
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
