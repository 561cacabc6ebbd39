"""Streams of text: ends, results and errors."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm import batch, generate, stream
from mlxlm.backend.mlx import mx
from mlxlm.generation import LoadedModel
from mlxlm.tokenizer import Tokenizer, train
from mlxlm.utils.errors import GenerationError


class Scripted:
    """A model that always generates the same tokens."""

    def __init__(self, lm, answer):
        self._decoder, self._answer = lm.model, answer
        self.layers = lm.model.layers
        self.prompt_length = None

    def __call__(self, ids, cache=None):
        logits = self._decoder(ids, cache=cache)
        position = cache[0].offset - self.prompt_length
        wanted = self._answer[position] if 0 <= position < len(self._answer) else 0
        return mx.where(mx.arange(logits.shape[-1]) == wanted, 100.0, mx.zeros_like(logits))


def scripted(lm, prompt, answer):
    """`lm`, with a model that answers `prompt` with the tokens of `answer`, a text or ids."""
    ids = lm.tokenizer.encode(answer, add_special_tokens=False) if isinstance(answer, str) else answer
    model = Scripted(lm, ids)
    model.prompt_length = len(lm.tokenizer.encode(prompt))
    return LoadedModel(model, lm.tokenizer, lm.config, lm.path)


def test_chunks_join_to_the_result(lm):
    text = stream(lm, "The quick", max_tokens=30, seed=4)
    chunks = list(text)
    assert "".join(chunk.text for chunk in chunks) == text.result().text
    assert [chunk.token for chunk in chunks] == text.result().tokens
    assert text.result().text == lm.tokenizer.decode(text.result().tokens)
    assert [chunk.finish_reason for chunk in chunks] == [None] * 29 + ["length"]


def test_characters_are_never_split(lm):
    answer = "Grüße, 世界! 🦊"
    chunks = [chunk.text for chunk in stream(scripted(lm, "x", answer), "x", max_tokens=25, temperature=0)]
    assert "".join(chunks).startswith(answer)
    assert "\ufffd" not in "".join(chunks)


def test_the_end_token_ends_the_text_and_adds_nothing(lm):
    eos = lm.tokenizer.eos_token_id
    ids = lm.tokenizer.encode("The fox", add_special_tokens=False)
    result = generate(scripted(lm, "x", [*ids, eos, *ids]), "x", temperature=0)
    assert (result.text, result.finish_reason, result.tokens) == ("The fox", "eos", [*ids, eos])


def test_text_ends_before_a_stop_string(lm):
    result = generate(scripted(lm, "x", "The quick brown fox"), "x", temperature=0, stop=["ck b", "zzz"])
    assert (result.text, result.finish_reason) == ("The qui", "stop")


def test_an_incomplete_character_at_the_end(lm):
    ids = lm.tokenizer.encode("🦊", add_special_tokens=False)
    assert len(ids) > 1
    result = generate(scripted(lm, "x", ids), "x", temperature=0, max_tokens=1)
    assert (result.text, result.finish_reason) == ("\ufffd", "length")


def test_the_context_ends_a_text(lm):
    result = generate(lm, [1] * 120, max_tokens=None, temperature=0)
    assert (len(result.tokens), result.finish_reason) == (8, "context")
    assert generate(lm, [1] * 120, max_tokens=8, temperature=0).finish_reason == "length"


def test_equal_seeds_give_equal_texts(lm):
    first = generate(lm, "The", max_tokens=20, temperature=1.0)
    again = generate(lm, "The", max_tokens=20, temperature=1.0, seed=first.seed)
    assert first.tokens == again.tokens
    assert first.tokens != generate(lm, "The", max_tokens=20, temperature=1.0, seed=first.seed + 1).tokens


def test_timings(lm):
    text = stream(lm, "The quick", max_tokens=5)
    list(text)
    timings = text.result().timings
    assert timings.time_to_first_token > 0 and timings.tokens_per_second > 0 and timings.prompt_tokens_per_second > 0
    assert timings.peak_memory_bytes > 0


def test_a_cancelled_text_is_what_was_iterated(lm):
    text = stream(lm, "The quick brown", max_tokens=60, logprobs=0)
    chunks = [next(text), next(text)]
    text.cancel()
    result = text.result()
    assert list(text) == [] and result.finish_reason is None
    assert result.tokens == [chunk.token for chunk in chunks] and len(result.logprobs) == 2
    assert result.text == "".join(chunk.text for chunk in chunks)
    prompt = [*lm.tokenizer.encode("The quick brown"), *result.tokens]
    assert generate(lm, [*prompt, 5], max_tokens=1).cached_tokens >= len(prompt) - 1


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1] * 128, {}, "128 tokens.*context length is 128.*at most 127"),
        ([10**6], {}, "ids from 0 to"),
        (b"x", {}, "neither a text nor a list of ids"),
        ("x", {"max_tokens": 0}, "max_tokens is 0"),
        ("x", {"stop": ["a", ""]}, "stop has '', it must be text"),
        ("x", {"temprature": 1}, "no option temprature.*temperature"),
        ("x", {"logit_bias": {300: 1}}, "logit_bias names the token 300"),
        ("x", {"json_schema": {"unheardOf": 1, "$ref": "#/nowhere"}}, "json_schema"),
    ],
)
def test_refused_before_anything_is_computed(lm, prompt, options, message):
    with pytest.raises(GenerationError, match=message):
        stream(lm, prompt, **options)


def test_an_empty_text_begins_with_bos(lm):
    bos = lm.tokenizer.bos_token_id
    options = {"max_tokens": 5, "temperature": 0}
    expected = generate(lm, [bos], **options).tokens
    assert generate(lm, "", **options).tokens == expected
    assert batch(lm, [""], **options)[0].tokens == expected


def test_logprobs_come_with_the_chunks(lm):
    text = stream(lm, "The quick", max_tokens=9, temperature=1.0, seed=3, logprobs=2)
    chunks = list(text)
    assert [chunk.logprob for chunk in chunks] == text.result().logprobs
    for chunk in chunks:
        assert chunk.logprob.token == chunk.token and len(chunk.logprob.top_logprobs) == 2
        assert chunk.logprob.top_logprobs[0][1] >= chunk.logprob.logprob - 1e-5
    assert generate(lm, "x", max_tokens=1).logprobs is None


@cache
def tokenizer_of(kind):
    """Few letters, so that most characters are several tokens."""
    words = ["the hat that hath heat at the heath, and the tea there. " * 9]
    tokens = train(words, 280, kind) if kind == "byte-level" else train(words, 290, "sentencepiece")
    if kind == "llama2":  # takes a space off the front of a text
        runtime = tokenizers.Tokenizer.from_str(tokens.to_json())
        decoders = tokenizers.decoders
        runtime.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
        tokens = Tokenizer(runtime, tokens.special_token_names)
    return tokens


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece", "llama2"])
@settings(max_examples=12)
@given(answer=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12), blanks=st.integers(0, 3))
def test_the_bytes_of_all_tokens_are_those_of_the_text(lm, kind, answer, blanks):
    """Also where a character is several tokens."""
    lm = replace(lm, tokenizer=tokenizer_of(kind))
    ids = lm.tokenizer.encode(" " * blanks + answer, continues=True)
    ids = [*ids, lm.tokenizer.eos_token_id]
    result = generate(scripted(lm, "x", ids), "x", temperature=0, max_tokens=100, logprobs=2)
    assert result.tokens == ids
    assert b"".join(entry.bytes for entry in result.logprobs) == result.text.encode()
    for entry in result.logprobs:
        assert [top_logprobs.bytes for top_logprobs in entry.top_logprobs if top_logprobs.token == entry.token] == [
            entry.bytes
        ]


def test_tokens_that_are_not_bytes_have_none(lm, monkeypatch):
    monkeypatch.setattr(Tokenizer, "has_byte_tokens", False)
    [entry] = generate(lm, "x", max_tokens=1, logprobs=1).logprobs
    assert entry.bytes is None and entry.top_logprobs[0].bytes is None


def test_a_constrained_text_ends_where_it_is_complete(lm):
    for seed in range(5):
        result = generate(lm, "x", choice=["The fox", "dog"], temperature=1.0, seed=seed)
        assert result.text in ("The fox", "dog")
        assert (result.finish_reason, result.constraint_error) == ("eos", None)


@pytest.mark.parametrize(
    ("constraint", "stop", "text", "reason", "constraint_error"),
    [
        ({"choice": "The fox"}, ("\n",), "The fox", "eos", None),
        ({"choice": "The fox"}, ("fox and",), "The fox", "eos", None),
        ({"choice": "The fox"}, ("fox",), "The ", "stop", "choice"),
        ({"regex": "fox(;a)?"}, (";",), "fox", "stop", None),
        ({"regex": "fox(;a)?"}, (";a",), "fox", "stop", None),
        ({"regex": "fox;a"}, (";",), "fox", "stop", "regex"),
        ({"json_schema": {"const": "a\nb"}}, ("b", '"x'), '"a\\n', "stop", "json_schema"),
        ({"json_schema": {"const": {}}}, ("}",), "{", "stop", "json_schema"),
    ],
)  # fmt: skip
def test_stop_strings_beside_a_constraint(lm, constraint, stop, text, reason, constraint_error):
    options = {**constraint, "stop": stop, "temperature": 0, "logit_bias": {lm.tokenizer.eos_token_id: -1000}}
    run = stream(lm, "x", **options)
    chunks = list(run)
    assert ("".join(chunk.text for chunk in chunks), chunks[-1].finish_reason) == (run.result().text, reason)
    assert run.result().text == text
    expected = f"a stop string ended the text before it matched {constraint_error}"
    assert run.result().constraint_error == (expected if constraint_error else None)
    for together in batch(lm, ["x", "y"], **options):
        assert (together.text, together.finish_reason, together.constraint_error) == (
            text,
            reason,
            run.result().constraint_error,
        )


def test_a_constraint_that_no_token_can_fulfill(lm):
    class Few(Tokenizer):
        """One of which no token stands for a z."""

        def __init__(self):
            self.__dict__ = lm.tokenizer.__dict__ | {"_bytes": {}}

        def token_bytes(self, id, **options):
            return super().token_bytes(id, **options).replace(b"z", b"")

    result = generate(replace(lm, tokenizer=Few()), "x", regex="az", temperature=0)
    assert (result.text, result.finish_reason) == ("a", "constraint")
    assert result.constraint_error.startswith("regex: ")


@pytest.mark.parametrize("prompt", [3, 1.5, ["a"], [1.5], ["a", 3], [[3]]])
def test_invalid_prompts_are_refused(lm, prompt):
    with pytest.raises(GenerationError, match="neither a text nor a list of ids"):
        stream(lm, prompt)


def test_numpy_integers_are_ids(lm):
    wanted = generate(lm, [3, 4], temperature=0, max_tokens=3)
    assert generate(lm, np.array([3, 4]), temperature=0, max_tokens=3).tokens == wanted.tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv": "8"}, r"kv is '8' \(try: mlxlm.cache.KVOptions"),
        ({"speculation": "lookup"}, r"speculation is 'lookup' \(try: SpeculativeDecoder\(PromptLookup\(\)\)"),
        ({"tempature": 1}, r"there is no option tempature \(try: temperature or \w+ or \w+\)$"),
        ({"speculations": 1}, r"there is no option speculations \(try: speculation or"),
    ],
)
def test_invalid_arguments_are_refused(lm, arguments, message):
    with pytest.raises(GenerationError, match=message):
        stream(lm, "a", **arguments)
