"""Scores equal the log-probabilities of one forward pass, with any special tokens in front."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm import generate
from mlxlm.backend.mlx import mx
from mlxlm.generation import score, scoring
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import GenerationError

TEXT = "The quick brown fox. Grüße, 世界!"
LN2 = math.log(2)


def plain(model, ids):
    """log p of each id but the first, from one pass over all of them."""
    logits = model(mx.array([ids]))[0].astype(mx.float32)
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return [logprobs[i, token].item() for i, token in enumerate(ids[1:])]


def near(values):
    return pytest.approx(values, abs=2e-3)


@settings(max_examples=10)
@given(st.text(alphabet="The quick, brown世", min_size=1, max_size=60), st.integers(1, 40))
def test_scores_in_chunks_of_any_size(lm, text, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "_CHUNK_SIZE", chunk)
        found = score(lm, text)
    ids = lm.tokenizer.encode(text)
    assert found.tokens == ids[1:] and found.logprobs == near(plain(lm.model, ids))
    assert found.total == pytest.approx(sum(found.logprobs))
    assert found.bits_per_byte == pytest.approx(-found.total / LN2 / len(text.encode()))


def test_score_after_a_prompt(lm):
    found = score(lm, " brown fox", prompt="The quick")
    prompt = lm.tokenizer.encode("The quick")
    text = lm.tokenizer.encode(" brown fox", add_special_tokens=False)
    assert found.tokens == text
    assert found.logprobs == near(plain(lm.model, prompt + text)[len(prompt) - 1 :])
    assert found.bits_per_byte == pytest.approx(-found.total / LN2 / len(" brown fox"))


def test_the_score_of_a_text_is_what_its_generation_reported(lm):
    result = generate(lm, "The quick", max_tokens=12, temperature=0, logprobs=0)
    ids = lm.tokenizer.encode("The quick") + result.tokens
    assert [token.logprob for token in result.logprobs] == near(plain(lm.model, ids)[-12:])
    assert [token.token for token in result.logprobs] == result.tokens


def without_start(lm):
    """The same tokenizer, putting nothing in front of a text."""

    class Bare(Tokenizer):
        def __init__(self):
            self.__dict__ = lm.tokenizer.__dict__

        def encode(self, text, *, add_special_tokens=True, **kind):
            return super().encode(text, add_special_tokens=False, **kind)

        @property
        def prefix_token_ids(self):
            return []

    return replace(lm, tokenizer=Bare())


def test_a_first_token_without_bos_is_not_predicted(lm):
    bare = without_start(lm)
    found = score(bare, TEXT)
    ids = bare.tokenizer.encode(TEXT)
    assert found.tokens == ids and found.logprobs[0] is None
    assert found.logprobs[1:] == near(plain(lm.model, ids))
    predicted = len(TEXT.encode()) - len(bare.tokenizer.token_bytes(ids[0]))
    assert found.bits_per_byte == pytest.approx(-found.total / LN2 / predicted)
    alone = score(bare, "a")
    assert (alone.logprobs, alone.total) == ([None], 0) and math.isnan(alone.bits_per_byte)


def test_generated_text_is_likelier_than_other_text(lm):
    said = generate(lm, "The quick", max_tokens=8, temperature=0).tokens
    other = [(token + 1) % 300 for token in said]
    prompt = lm.tokenizer.encode("The quick")
    assert sum(plain(lm.model, prompt + said)[-8:]) > sum(plain(lm.model, prompt + other)[-8:])


@pytest.mark.parametrize(
    ("text", "prompt", "message"),
    [("", "", "text to score is empty"), ("", "x", "text to score is empty"), ("a " * 200, "", "context 128"),
     ("a " * 40, "b " * 40, "text and prompt have .* context 128")],
)  # fmt: skip
def test_refused(lm, text, prompt, message):
    with pytest.raises(GenerationError, match=message):
        score(lm, text, prompt=prompt)


def test_nan_logits_are_an_error(lm):
    class Broken:
        layers, config = lm.model.layers, lm.config

        def __call__(self, ids, cache=None):
            return lm.model(ids, cache=cache) * mx.nan

    with pytest.raises(GenerationError, match="not numbers"):
        score(replace(lm, model=Broken()), TEXT)


def test_only_strings_are_scored(lm):
    with pytest.raises(GenerationError, match="must be strings"):
        score(lm, [1, 2])
