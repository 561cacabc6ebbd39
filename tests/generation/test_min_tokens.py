"""`min_tokens`: the first tokens don't end a text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlxlm
from mlxlm.backend.mlx import mx
from mlxlm.generation import Engine, GenerationOptions, Request, Sampler
from mlxlm.generation.drafters import PromptLookup
from mlxlm.generation.stop_strings import StopStrings
from mlxlm.utils.errors import GenerationError
from tests.generation.fake_drafters import Oracle, always
from tests.generation.texts import same

PROMPTS = [[5, 9, 200], [17, 33, 33, 90], [41, 7], [123, 64, 5, 9]]
MAX_TOKENS = 12


def plain(lm, prompt, eos_ids, options):
    """The text by its definition: each token from a pass over everything before it, each end looked for in it."""
    is_eos = np.isin(np.arange(lm.config.vocab_size), list(eos_ids))
    free = Sampler(GenerationOptions(temperature=options["temperature"]), prompt, options["seed"])
    detokenizer, text, tokens = lm.tokenizer.detokenizer(), "", []
    while True:
        logits = np.array(lm.model(mx.array([prompt + tokens]))[0, -1:].astype(mx.float32))
        may_end = len(tokens) >= options["min_tokens"]
        tokens.append(free(mx.array(np.where(is_eos & (not may_end), -np.inf, logits))).item())
        before = len(text)
        reason = "eos" if is_eos[tokens[-1]] else "length" if len(tokens) == MAX_TOKENS else None
        text += "" if is_eos[tokens[-1]] else detokenizer.add_token(tokens[-1])
        text += detokenizer.finalize() if reason else ""
        found = [
            (end, end - len(stop))
            for stop in options["stop"]
            for end in range(max(before + 1, len(stop)), len(text) + 1)
            if may_end and text[:end].endswith(stop)
        ]
        if found:
            return tokens, text[: min(found)[1]], "stop"
        if reason:
            return tokens, text, reason


@settings(max_examples=12)
@given(
    st.lists(st.sampled_from(range(MAX_TOKENS + 1)), min_size=4, max_size=4),
    st.integers(0, 4),
    st.sets(st.sampled_from(["e", "th", "o", " ", "ow", "\ufffd"]), max_size=3),
    st.sampled_from([0, 1.0]),
    st.integers(0, 99),
)
def test_a_text_is_that_of_its_definition(lm, minima, third, stop, temperature, seed):
    """Alone, in a batch, and with drafts. A third of the vocabulary ends the text, or nothing does."""
    eos_ids = frozenset(range(third, 300, 3)) if third < 3 else frozenset()
    found, wanted = [], []
    for prompt, min_tokens in zip(PROMPTS, minima, strict=True):
        options = {"temperature": temperature, "seed": seed, "stop": sorted(stop), "min_tokens": min_tokens}
        wanted.append(plain(lm, prompt, eos_ids, options))
        found.append(Request(prompt, GenerationOptions(max_tokens=MAX_TOKENS, **options), eos_ids))
    with Engine(lm) as engine:
        together = [stream.result() for stream in [engine.submit(request) for request in found]]
    drafts = [always(PromptLookup(), 3), always(Oracle(wanted[0][0], wrong=3), 4)]
    for speculation in drafts:
        with Engine(lm, speculation=speculation) as engine:
            same(engine.submit(found[0]).result(), together[0])
    for result, text in zip(together, wanted, strict=True):
        assert (result.tokens, result.text, result.finish_reason) == text


@given(st.lists(st.text("ab", max_size=3), max_size=8), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
       st.integers(0, 8))  # fmt: skip
def test_stop_strings_that_the_first_pieces_complete_are_text(pieces, stop, free):
    stops = StopStrings(stop)
    found = "".join(stops.push(piece, number >= free) for number, piece in enumerate(pieces)) + stops.flush()
    text = "".join(pieces)
    start = len("".join(pieces[:free]))
    ends = [(end, end - len(s)) for s in stop for end in range(start + 1, len(text) + 1) if text[:end].endswith(s)]
    assert found == (text[: min(ends)[1]] if ends else text)


@pytest.mark.parametrize("speculation", [None, always(PromptLookup(), 3)])
def test_a_constraint_that_only_ends_ends_the_text(lm, speculation):
    options = {"speculation": speculation, "max_tokens": 30, "temperature": 0}
    result = mlxlm.generate(lm, "x", regex="ab{2,4}", min_tokens=20, **options)
    assert (result.text, result.finish_reason, result.constraint_error) == ("abbbb", "eos", None)
    result = mlxlm.generate(lm, "x", regex="[a-c]*", min_tokens=20, **options)
    assert len(result.tokens) > 20 and result.constraint_error is None
    assert mlxlm.generate(lm, "x", choice=["yes"], min_tokens=20, **options).text == "yes"


def test_functions_of_the_caller_do_not_end_it_either(lm):
    [eos] = lm.eos_token_ids
    to_eos = lambda ids, logits: mx.where(mx.arange(300) == eos, 100.0, mx.zeros_like(logits))  # noqa: E731
    result = mlxlm.generate(lm, [5], logits_processors=[to_eos], temperature=0, min_tokens=3)
    assert result.finish_reason == "eos" and len(result.tokens) == 4 and result.tokens.index(eos) == 3
    seen = []
    sampler = lambda logprobs: seen.append(logprobs[0, eos].item()) or eos  # noqa: E731
    result = mlxlm.generate(lm, [5], sampler=sampler, min_tokens=3)
    assert result.tokens == [eos] * 4 and result.text == ""
    assert np.isneginf(seen).tolist() == [True] * 3 + [False]


def test_the_rest_of_a_character_completes_no_stop_string(lm):
    part = lm.tokenizer.encode("🦊", add_special_tokens=False)[0]
    options = {"logit_bias": {part: 10_000}, "max_tokens": 1, "temperature": 0, "stop": ["\ufffd"]}
    assert mlxlm.generate(lm, [5], **options).finish_reason == "stop"
    result = mlxlm.generate(lm, [5], min_tokens=1, **options)
    assert (result.text, result.finish_reason) == ("\ufffd", "length")


def test_more_than_max_tokens_is_an_error(lm):
    with pytest.raises(GenerationError, match="min_tokens is 9, it must be at most max_tokens, which is 8"):
        mlxlm.generate(lm, "x", min_tokens=9, max_tokens=8)
    for wrong in (-1, 1.5, "3", True):
        with pytest.raises(GenerationError, match="min_tokens is .*, it must be a whole number from 0 up"):
            mlxlm.generate(lm, "x", min_tokens=wrong)
    full = mlxlm.generate(lm, [1] * 120, min_tokens=20, max_tokens=None, temperature=0)
    assert (len(full.tokens), full.finish_reason) == (8, "context")
