"""Logits processors and samplers of the caller."""

import threading

import numpy as np
import pytest

import mlxlm
from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions
from mlxlm.chat.session import Chat
from mlxlm.generation.drafters import PromptLookup
from mlxlm.generation.speculative import SpeculativeDecoder
from mlxlm.utils.errors import GenerationError

GREEDY = {"temperature": 0, "max_tokens": 8}


def only(token):
    """A processor that leaves one token."""
    return lambda ids, logits: mx.where(mx.arange(logits.shape[-1]) == token, logits, -mx.inf)


def test_a_processor_gets_all_tokens_and_changes_the_text(lm):
    seen = []

    def processor(ids, logits):
        seen.append((ids.tolist(), logits.shape))
        return only(40 + len(seen))(ids, logits)

    result = mlxlm.generate(lm, [10, 11, 12], logits_processors=[processor], temperature=0.7, max_tokens=5)
    assert result.tokens == [41, 42, 43, 44, 45]
    assert seen == [([10, 11, 12, *range(41, 41 + n)], (1, 300)) for n in range(5)]


def test_processors_are_called_in_order_before_the_options(lm):
    seen = []
    processors = [lambda ids, x: x * 0, lambda ids, x: seen.append(x.max().item()) or x + 1]
    biased = mlxlm.generate(lm, "Hello", logits_processors=processors, logit_bias={77: 5}, **GREEDY)
    assert biased.tokens == [77] * 8
    assert seen == [0] * 8


def test_a_sampler_draws_from_log_probabilities(lm):
    sums = []

    def sampler(logprobs):
        sums.append(mx.exp(logprobs).sum().item())
        return mx.argmin(logprobs, axis=-1)

    result = mlxlm.generate(lm, "Hello", sampler=sampler, max_tokens=4, logit_bias={99: -1000})
    assert result.tokens == [99] * 4
    np.testing.assert_allclose(sums, 1, rtol=1e-5)
    greedy = mlxlm.generate(lm, "Hello", sampler=lambda logprobs: mx.argmax(logprobs, axis=-1), max_tokens=8)
    assert greedy.tokens == mlxlm.generate(lm, "Hello", **GREEDY).tokens


def test_functions_are_called_once_per_token_also_next_to_other_texts(lm):
    calls = []

    def processor(ids, logits):
        calls.append((len(ids), threading.current_thread().name))
        return logits

    prompts = [[10] * length for length in (3, 4, 5, 6, 7, 8)]
    plain = [result.tokens for result in mlxlm.batch(lm, prompts, **GREEDY)]
    others = [mlxlm.stream(lm, prompt, temperature=0, max_tokens=30) for prompt in prompts]
    results = dict(mlxlm.batch_as_completed(lm, prompts, logits_processors=[processor], **GREEDY))
    assert [results[index].tokens for index in range(6)] == plain
    assert len(calls) == 6 * 8
    assert {name for _, name in calls} == {"mlxlm"}
    assert all(len(other.result().tokens) == 30 for other in others)


def test_results_come_as_their_texts_end(lm):
    [eos] = lm.eos_token_ids

    def first_id_is_the_length(ids, logits):
        return only(40 if len(ids) < ids[0].item() else eos)(ids, logits)

    prompts = [[50, 9], [30, 9], [10, 9]]
    batch = mlxlm.batch_as_completed(lm, prompts, logits_processors=[first_id_is_the_length], max_tokens=60)
    assert [(index, len(result.tokens)) for index, result in batch] == [(2, 9), (1, 29), (0, 49)]


def test_an_exception_of_a_function_is_raised_and_other_texts_go_on(lm):
    def broken(ids, logits):
        raise ZeroDivisionError("mine")

    other = mlxlm.stream(lm, "Hello", **GREEDY)
    with pytest.raises(ZeroDivisionError, match="mine"):
        mlxlm.generate(lm, "Hello", logits_processors=[broken], **GREEDY)
    assert len(other.result().tokens) == 8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logits_processors": [lambda ids, logits: logits[0]]}, r"a logits processor returned \(300,\)"),
        ({"logits_processors": [lambda ids, logits: None]}, "a logits processor returned NoneType"),
        ({"sampler": lambda logprobs: 300}, "the sampler returned 300 .*from 0 to 299"),
        ({"sampler": lambda logprobs: -1}, "the sampler returned -1"),
        ({"sampler": lambda logprobs: 0.5}, "the sampler returned 0.5"),
        ({"sampler": lambda logprobs: None}, "the sampler returned None .*from 0 to 299"),
        ({"logits_processors": [lambda ids, logits: logits * float("nan")]}, "after the logits processors, no logit"),
        ({"sampler": lambda logprobs: logprobs}, "the sampler returned an array"),
        ({"sampler": 3}, "sampler is 3"),
        ({"logits_processors": lambda ids, logits: logits}, "logits_processors is <function"),
        ({"sampler": mx.argmax, "temperature": 0.5, "top_p": 0.9}, "a sampler replaces temperature, top_p"),
        ({"sampler": mx.argmax, "seed": 1}, "a sampler replaces seed"),
        ({"sampler": mx.argmax, "choice": ["a"]}, "a sampler can't be combined with choice"),
    ],
)
def test_what_functions_cannot_do_is_an_error(lm, options, message):
    with pytest.raises(GenerationError, match=message):
        mlxlm.generate(lm, "Hello", max_tokens=3, **options)


def test_an_array_that_is_not_evaluated_is_explained(lm):
    lazy = mx.zeros(300) + 1
    with pytest.raises(GenerationError, match=r"isn't evaluated \(try: mx.eval"):
        mlxlm.generate(lm, "Hello", logits_processors=[lambda ids, logits: logits + lazy], max_tokens=3)


def test_functions_exclude_speculation_and_a_sampler_excludes_tools(lm):
    def now() -> str:
        return "12:00"

    speculation = SpeculativeDecoder(PromptLookup())
    with pytest.raises(GenerationError, match="can't be combined with speculation"):
        mlxlm.generate(lm, "Hello", logits_processors=[only(40)], speculation=speculation)
    with pytest.raises(GenerationError, match="nor with tools"):
        Chat(lm, tools=[now], sampler=mx.argmax)


def test_a_constraint_holds_after_the_processors(lm):
    y = lm.tokenizer.encode("y", add_special_tokens=False)[0]
    prefer = lambda ids, logits: logits + 1000 * (mx.arange(300) == y)  # noqa: E731
    assert mlxlm.generate(lm, "Hello", logits_processors=[prefer], choice=["no", "yes"], max_tokens=8).text == "yes"
    with pytest.raises(GenerationError, match="after the logits processors, no logit is finite"):
        mlxlm.generate(lm, "Hello", logits_processors=[only(y)], choice=["no"], max_tokens=8)


def test_a_chat_uses_functions_in_each_answer(lm):
    chat = Chat(lm, logits_processors=[only(45)], kv=KVOptions(), max_tokens=3)
    for question in ("Hello!", "Why?"):
        assert chat.ask(question).result().tokens == [45] * 3
