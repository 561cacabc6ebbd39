"""DRY: against its definition, and its sequence breakers."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from mlxlm.generation import GenerationOptions, Sampler
from mlxlm.generation.penalties import dry_breaker_mask
from mlxlm.utils.errors import GenerationError
from tests.generation.penalized import V, few_tokens, penalized


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
