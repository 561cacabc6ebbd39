"""Batches of one row: the tokens of a naive loop, and what the caches hold."""

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions
from mlxlm.generation import GenerationOptions, Sampler, device_memory, greedy_tokens
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.generation.device_memory import CLEAR_CACHE_INTERVAL
from tests.generation.reference_decoding import (
    PROMPT,
    STATE_SPACE,
    Counting,
    batch_of_one,
    decode,
    held,
    mlx_lm_model,
    naive,
)  # fmt: skip


def greedy(model, prompt, count, **arguments):
    return list(greedy_tokens(DecodeStep(model), prompt, count, **arguments))


@pytest.mark.parametrize(("prompt", "chunk"), [(PROMPT, 1), (PROMPT, 3), (PROMPT, 10), (PROMPT, 11), ([7], 5)])
def test_any_prefill_chunk_gives_the_tokens_of_the_naive_loop(lm, prompt, chunk):
    assert greedy(lm.model, prompt, 20, prefill_step_size=chunk) == naive(lm.model, prompt, 20)


@pytest.mark.parametrize("kv", [KVOptions.of(size=16, keep=2), KVOptions.of(size=1000)])
def test_the_prefill_step_size_changes_no_token(lm, kv):
    prompt = PROMPT * 4
    wanted = greedy(lm.model, prompt, 20, kv=kv, prefill_step_size=1)
    for chunk in (3, 7, 50):
        assert greedy(lm.model, prompt, 20, kv=kv, prefill_step_size=chunk) == wanted
    assert kv.size < 1000 or wanted == naive(lm.model, prompt, 20)


def test_prefill_chunks_and_no_step_after_the_last_token(lm):
    model = Counting(lm.model)
    greedy(model, PROMPT, 3, prefill_step_size=4)
    assert model.calls == [4, 4, 2] + [1, 1, 1]


def test_the_next_step_is_dispatched_before_a_token_is_read(lm):
    model = Counting(lm.model)
    next(greedy_tokens(DecodeStep(model), PROMPT, 10))
    assert model.calls == [len(PROMPT) - 1, 1, 1]


@pytest.mark.parametrize("taken", [1, 2, 7])
def test_caches_hold_prompt_and_tokens(lm, taken):
    batch, row = batch_of_one(lm.model, PROMPT, 50)
    tokens = decode(batch, row, taken)
    assert len(tokens) == taken and held(batch, row) == PROMPT + tokens


def test_at_the_limit_the_last_token_is_not_in_the_cache(lm):
    batch, row = batch_of_one(lm.model, PROMPT, 6)
    assert held(batch, row) == PROMPT[:-1]
    tokens = decode(batch, row)
    assert len(tokens) == 6 and held(batch, row) == PROMPT + tokens[:-1]


def test_a_sampler_that_needs_the_last_token_accepts_it_before_the_next_draw(lm):
    model = Counting(lm.model)
    sampler = Sampler(GenerationOptions(temperature=1.0), PROMPT, 1, tokenizer=lm.tokenizer)
    drawn, accepted = [], []

    class Matcher:
        finished, error = False, None

        def draft_token_bitmasks(self, draft):
            assert len(accepted) == len(drawn)  # every token so far was accepted
            drawn.append(1)
            return [np.full(300 // 32 + 1, 2**32 - 1, np.uint32)]

        def consume(self, token):
            accepted.append(token)

    sampler.matcher = Matcher()
    batch, row = batch_of_one(model, PROMPT, 12, sampler=sampler)
    decode(batch, row, 2)
    # The pass over the token is on its way all the same.
    assert model.calls[-3:] == [1, 1, 1] and len(drawn) == 3
    assert decode(batch, row) == accepted and len(accepted) == 12


@pytest.mark.parametrize("kind", ["gemma3_text", "mamba"])
def test_architectures_of_mlx_lm(kind):
    """Sliding windows and recurrent states."""
    model = mlx_lm_model(kind, **STATE_SPACE, sliding_window=8, sliding_window_pattern=2)
    assert greedy(model, PROMPT, 12, prefill_step_size=4) == naive(model, PROMPT, 12)


def test_greedy_tokens_equal_those_of_mlx_lm(lm):
    generate_step = pytest.importorskip("mlx_lm.generate", reason="mlx_lm is not installed").generate_step
    theirs = [token for token, _ in generate_step(mx.array(PROMPT), lm.model, max_tokens=30)]
    assert greedy(lm.model, PROMPT, 30) == theirs


def test_freed_buffers_do_not_pile_up(lm, monkeypatch):
    monkeypatch.setattr(device_memory, "MAX_FREED_BYTES", 1 << 18)
    kept, length = [], max(160, CLEAR_CACHE_INTERVAL)
    for n, _ in enumerate(greedy_tokens(DecodeStep(lm.model), PROMPT, length), 1):
        if n % CLEAR_CACHE_INTERVAL == 0:
            kept.append(mx.get_cache_memory())
    assert max(kept) <= 1 << 20
