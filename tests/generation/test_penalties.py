"""Biases, penalties and DRY: against naive loops, definitions and transformers, prompt and window included."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from mlxlm.generation import GenerationOptions, Sampler
from mlxlm.generation.penalties import PenaltyState, apply_penalties, dry_breaker_mask, penalty_numbers
from mlxlm.utils.errors import GenerationError

V = 12


def penalized(options, prompt, generated, logits, breakers=None):
    """The logits `[V]` after bias and penalties, for the token after `prompt` and `generated`."""
    state = PenaltyState.from_prompt(options, prompt, len(logits), breakers)
    for token in generated:
        state = state.with_tokens(mx.array([token]), breakers)
    bias = np.zeros(len(logits), np.float32)
    bias[list(options.logit_bias)] = list(options.logit_bias.values())
    return np.array(apply_penalties(mx.array(logits)[None], penalty_numbers(options), state, mx.array(bias)))[0]


few_tokens = st.lists(st.integers(0, 3), min_size=1, max_size=40)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("penalty", [0.5, 1.3, 2.0])
def test_the_repetition_penalty_equals_transformers(seed, penalty):
    from transformers import RepetitionPenaltyLogitsProcessor

    rng = np.random.default_rng(seed)
    logits = rng.normal(size=V).astype(np.float32)
    prompt, generated = rng.integers(0, V, 5).tolist(), rng.integers(0, V, 3).tolist()
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([prompt + generated]), torch.tensor(logits)[None])
    ours = penalized(GenerationOptions(repetition_penalty=penalty), prompt, generated, logits)
    np.testing.assert_allclose(ours, theirs[0].numpy(), rtol=1e-6)


def test_the_window_of_the_repetition_penalty():
    options = GenerationOptions(temperature=0, repetition_penalty=10.0, repetition_context_size=2)
    sampler = Sampler(options, [0, 1], seed=0)
    logits = mx.array([[4.0, 3.0, 2.0, 1.0]])
    assert [sampler(logits).item() for _ in range(5)] == [2, 0, 1, 2, 0]


def test_a_prompt_shorter_than_the_window_penalises_nothing_else():
    logits = np.arange(1, V + 1, dtype=np.float32)
    ours = penalized(GenerationOptions(repetition_penalty=2.0), [3], [], logits)
    assert np.flatnonzero(ours != logits).tolist() == [3]
    assert (penalized(GenerationOptions(repetition_penalty=2.0), [], [], logits) == logits).all()


@settings(max_examples=50)
@given(few_tokens, few_tokens, st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_count_what_was_generated(prompt, generated, presence, frequency):
    options = GenerationOptions(presence_penalty=presence, frequency_penalty=frequency)
    counts = np.bincount(generated, minlength=V)
    wanted = np.zeros(V) - presence * (counts > 0) - frequency * counts
    ours = penalized(options, prompt, generated, np.zeros(V, np.float32))
    np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-6)


def test_the_order_is_bias_then_repetition_then_the_others():
    options = GenerationOptions(
        logit_bias={3: -4.0, 5: 1.0}, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25,
        dry_multiplier=3.0, dry_allowed_length=1, dry_sequence_breakers=(),
    )  # fmt: skip
    ours = penalized(options, [1, 3, 7], [3], np.full(V, 2.0, np.float32))
    wanted = np.full(V, 2.0)
    wanted[3] = (2.0 - 4.0) * 2 - 0.5 - 0.25  # below zero after the bias: multiplied
    wanted[5] = 3.0
    wanted[1] = 2.0 / 2
    wanted[7] = 2.0 / 2 - 3.0  # it followed 3
    np.testing.assert_allclose(ours, wanted, rtol=1e-6)


def test_options_beyond_the_vocabulary_are_refused():
    for options, problem in (
        ({"logit_bias": {3: 1.0, V: 1.0}}, "logit_bias names the token 12"),
        ({"logprobs": V + 1}, "logprobs is 13, and the model has 12 tokens"),
    ):
        with pytest.raises(GenerationError, match=problem):
            GenerationOptions(**options).check_vocabulary(V)
        with pytest.raises(GenerationError, match=problem):
            Sampler(GenerationOptions(**options), [1], 0)(mx.zeros((1, V)))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 4, V])
def test_logprobs_are_those_of_the_model(dtype, n):
    options = GenerationOptions(temperature=2.0, top_k=3, logit_bias={2: 5.0}, repetition_penalty=1.5, logprobs=n)
    sampler = Sampler(options, [1, 2], seed=3)
    logits = (mx.random.normal((5, 1, V), key=mx.random.key(1)) * 3).astype(dtype)
    tokens = [sampler(row).item() for row in logits]
    for row, token in zip(np.array(logits.astype(mx.float32))[:, 0].astype(np.float64), tokens, strict=True):
        wanted = row - np.log(np.exp(row).sum())
        logprobs = sampler.pop_logprobs()
        assert logprobs.token == token and logprobs.logprob == pytest.approx(wanted[token], abs=1e-4)
        assert [entry.logprob for entry in logprobs.top_logprobs] == pytest.approx(np.sort(wanted)[::-1][:n], abs=1e-4)
        assert len({entry.token for entry in logprobs.top_logprobs}) == n
        assert all(entry.logprob == pytest.approx(wanted[entry.token], abs=1e-4) for entry in logprobs.top_logprobs)
    assert sampler.pop_logprobs() is None


def dry(options, said, logits, breakers):
    """DRY from its definition: for every place where the last tokens stood before, how many of them did."""
    said = said[-options.dry_penalty_last_n :]
    worst = np.zeros(len(logits))
    for place in range(len(said) - 1):
        length = 0
        while length <= place and said[place - length] == said[-1 - length] and said[place - length] not in breakers:
            length += 1
        following = said[place + 1]
        if length >= options.dry_allowed_length and following not in breakers:
            penalty = options.dry_multiplier * options.dry_base ** (length - options.dry_allowed_length)
            worst[following] = max(worst[following], penalty)
    return logits - worst


@settings(max_examples=200)
@given(
    few_tokens,
    few_tokens,
    st.sets(st.integers(0, 3), max_size=2),
    st.integers(1, 4),
    st.sampled_from([1, 2, 3, 7, 16, 64]),
    st.sampled_from([1.0, 1.3, 2.0]),
)
def test_dry_equals_its_definition(prompt, generated, breakers, allowed, window, base):
    options = GenerationOptions(
        dry_multiplier=0.8, dry_base=base, dry_allowed_length=allowed, dry_penalty_last_n=window
    )
    logits = np.linspace(-3, 3, V, dtype=np.float32)
    table = mx.array([token in breakers for token in range(V)] + [False]) if breakers else None
    ours = penalized(options, prompt, generated, logits, table)
    np.testing.assert_allclose(ours, dry(options, prompt + generated, logits, breakers), rtol=1e-4, atol=1e-4)


def test_dry_breaks_a_loop():
    logits = np.zeros(V, np.float32)
    options = GenerationOptions(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=2, dry_sequence_breakers=())
    assert np.flatnonzero(penalized(options, [1, 2, 3, 4, 1, 2], [], logits)).tolist() == [3]
    assert penalized(options, [1, 2, 3, 4, 1, 2, 3], [], logits)[4] == -2
    assert not penalized(options, [1, 2, 3, 4, 5, 6], [], logits).any()


def test_a_long_repetition_stays_finite():
    options = GenerationOptions(dry_multiplier=100.0, dry_base=100.0, dry_sequence_breakers=(), temperature=0)
    logits = penalized(options, [5] * 400, [5] * 40, np.zeros(V, np.float32))
    assert np.isfinite(logits).all() and logits.argmin() == 5


def test_breaker_mask(lm):
    table = dry_breaker_mask(GenerationOptions(dry_multiplier=1.0, dry_sequence_breakers=("q", "<|end")), lm.tokenizer)
    found = [id for id in range(lm.tokenizer.vocab_size) if table[id].item()]
    special = {id for name, id in lm.tokenizer.special_tokens.items() if "<|end" in name or "q" in name}
    assert found == sorted(special | {i for i in range(300) if b"q" in lm.tokenizer.token_bytes(i)}) and found
    assert not table[len(table) - 1].item()


def test_breakers_without_a_token_are_refused(lm):
    for options, tokenizer, problem in (
        ({"dry_sequence_breakers": ("no such text",)}, lm.tokenizer, "no token contains 'no such text'"),
        ({}, None, "need a tokenizer"),
    ):
        with pytest.raises(GenerationError, match=problem):
            Sampler(GenerationOptions(dry_multiplier=1.0, **options), [1], 0, tokenizer=tokenizer)
    Sampler(GenerationOptions(dry_multiplier=1.0, dry_sequence_breakers=()), [1], 0)
    Sampler(GenerationOptions(), [1], 0)
