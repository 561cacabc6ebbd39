"""Prefill and decode: the tokens of a naive loop, and the ids in the cache."""

import pytest

from mlxlm.backend.mlx import mx
from mlxlm.generation import Context, device_memory, generate_tokens
from mlxlm.generation.device_memory import CLEAR_CACHE_INTERVAL
from tests.generation.reference_decoding import PROMPT, STATE_SPACE, greedy, mlx_lm_model, naive


class Counting:
    """A model that records how many tokens each call reads."""

    def __init__(self, model):
        self._model, self.layers, self.calls = model, model.layers, []

    def __call__(self, ids, cache=None):
        self.calls.append(ids.shape[1])
        return self._model(ids, cache=cache)


def offsets(context):
    return {cache.offset for cache in context.caches}


@pytest.mark.parametrize("chunk", [1, 3, 10, 11])
def test_any_prefill_chunk_gives_the_tokens_of_the_naive_loop(lm, chunk):
    context = Context(lm.model)
    assert list(generate_tokens(context, PROMPT, greedy, 20, prefill_step_size=chunk)) == naive(lm.model, PROMPT, 20)


def test_a_prompt_of_one_token(lm):
    assert list(generate_tokens(Context(lm.model), [7], greedy, 5)) == naive(lm.model, [7], 5)


def test_prefill_chunks_and_no_step_after_the_last_token(lm):
    model = Counting(lm.model)
    progress = []
    list(generate_tokens(Context(model), PROMPT, greedy, 3, prefill_step_size=4, on_prefill=progress.append))
    assert model.calls == [4, 4, 2] + [1, 1, 1]
    assert progress == [4, 8, 10]


def test_the_next_step_is_dispatched_before_a_token_is_read(lm):
    model = Counting(lm.model)
    stream = generate_tokens(Context(model), PROMPT, greedy, 10)
    next(stream)
    assert model.calls == [len(PROMPT) - 1, 1, 1]


@pytest.mark.parametrize("kept", [1, 2, 7])
def test_closing_early_leaves_prompt_and_yielded_tokens(lm, kept):
    context = Context(lm.model)
    stream = generate_tokens(context, PROMPT, greedy, 50)
    taken = [next(stream) for _ in range(kept)]
    stream.close()
    assert context.ids == PROMPT + taken
    assert offsets(context) == {len(PROMPT) + kept}


def test_at_the_limit_the_last_token_is_not_in_the_cache(lm):
    context = Context(lm.model)
    taken = list(generate_tokens(context, PROMPT, greedy, 6))
    assert context.ids == PROMPT + taken[:-1]
    assert offsets(context) == {len(PROMPT) + 5}


def test_a_context_reads_only_what_is_new(lm):
    model = Counting(lm.model)
    context = Context(model)
    stream = generate_tokens(context, PROMPT, greedy, 50)
    answer = [next(stream) for _ in range(4)]
    stream.close()
    longer = PROMPT + answer[:3] + [50, 51, 52]  # departs from the cache at its last token
    model.calls.clear()
    assert list(generate_tokens(context, longer, greedy, 8)) == naive(lm.model, longer, 8)
    assert model.calls[:2] == [2, 1]


def test_the_same_prompt_again_reads_its_last_token_only(lm):
    model = Counting(lm.model)
    context = Context(model)
    first = list(generate_tokens(context, PROMPT, greedy, 4))
    model.calls.clear()
    assert list(generate_tokens(context, PROMPT, greedy, 4)) == first
    assert model.calls == [1] * 4


def test_caches_that_cannot_be_trimmed_are_emptied(lm):
    context = Context(lm.model)
    list(generate_tokens(context, PROMPT, greedy, 4))
    for cache in context.caches:
        cache.is_trimmable = lambda: False
    assert list(generate_tokens(context, PROMPT[:6] + [3], greedy, 4)) == naive(lm.model, PROMPT[:6] + [3], 4)


def test_an_exception_inside_a_step_empties_the_context(lm):
    context = Context(lm.model)

    def interrupted(logits):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(generate_tokens(context, PROMPT, interrupted, 4))
    assert context.ids == []
    assert list(generate_tokens(context, PROMPT, greedy, 4)) == naive(lm.model, PROMPT, 4)


def test_an_exception_between_chunks_keeps_what_was_read(lm):
    context = Context(lm.model)

    def stop(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(generate_tokens(context, PROMPT, greedy, 4, prefill_step_size=4, on_prefill=stop))
    assert context.ids == PROMPT[:4] and offsets(context) == {4}
    assert list(generate_tokens(context, PROMPT, greedy, 4)) == naive(lm.model, PROMPT, 4)


@pytest.mark.parametrize("kind", ["gemma3_text", "mamba"])
def test_architectures_of_mlx_lm(kind):
    """Sliding windows and recurrent states, also with a common prefix."""
    model = mlx_lm_model(kind, **STATE_SPACE, sliding_window=8, sliding_window_pattern=2)
    wanted = naive(model, PROMPT, 12)
    context = Context(model)
    assert list(generate_tokens(context, PROMPT, greedy, 12, prefill_step_size=4)) == wanted
    longer = PROMPT + wanted[:5] + [50, 51]
    assert list(generate_tokens(context, longer, greedy, 8)) == naive(model, longer, 8)


def test_greedy_tokens_equal_those_of_mlx_lm(lm):
    generate_step = pytest.importorskip("mlx_lm.generate", reason="mlx_lm is not installed").generate_step
    theirs = [token for token, _ in generate_step(mx.array(PROMPT), lm.model, max_tokens=30)]
    assert list(generate_tokens(Context(lm.model), PROMPT, greedy, 30)) == theirs


def test_freed_buffers_do_not_pile_up(lm, monkeypatch):
    monkeypatch.setattr(device_memory, "MAX_FREED_BYTES", 1 << 18)
    kept, length = [], max(160, CLEAR_CACHE_INTERVAL)
    for n, _ in enumerate(generate_tokens(Context(lm.model), PROMPT, greedy, length), 1):
        if n % CLEAR_CACHE_INTERVAL == 0:
            kept.append(mx.get_cache_memory())
    assert max(kept) <= 1 << 20
