"""`mlxlm.generate`, `stream` and `batch`: prompts, conversations, typed options."""

import json
from dataclasses import fields
from typing import Literal

import pydantic
import pytest

import mlxlm
from mlxlm.chat.chat_template import ChatTemplate
from mlxlm.chat.generate import BatchArguments, StreamArguments
from mlxlm.chat.messages import Message
from mlxlm.chat.session import Chat
from mlxlm.generation import GenerationOptions, loaded_model
from mlxlm.generation.options import OptionArguments
from mlxlm.utils.errors import CheckpointError, GenerationError, TokenizerError
from tests.chat.conversations import GREEDY

HELLO = [{"role": "user", "content": "Hello!"}]
LONG = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hello!"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "How are you?"},
]


def prompt_of(lm, messages):
    return ChatTemplate(lm.tokenizer).encode([Message(**message) for message in messages])


@pytest.mark.parametrize("messages", [HELLO, LONG], ids=len)
def test_conversations_are_prompts_of_the_chat_template(lm, messages):
    expected = mlxlm.generate(lm, prompt_of(lm, messages), **GREEDY)
    found = mlxlm.generate(lm, messages=messages, **GREEDY)
    assert (found.text, found.prompt_tokens) == (expected.text, expected.prompt_tokens)
    stream = mlxlm.stream(lm, messages=tuple(Message(**message) for message in messages), **GREEDY)
    assert "".join(chunk.text for chunk in stream) == expected.text
    assert mlxlm.generate(lm, prompt_of(lm, messages), **GREEDY).text == expected.text


def test_a_batch_of_conversations(lm):
    options = {"max_tokens": 8, "seed": 1}
    found = mlxlm.batch(lm, messages=[HELLO, LONG], num_samples=2, **options)
    prompts = [prompt_of(lm, HELLO), prompt_of(lm, LONG)]
    expected = mlxlm.batch(lm, prompts, num_samples=2, **options)
    assert [result.tokens for result in found] == [result.tokens for result in expected]
    assert len(found) == 4 and mlxlm.batch(lm, messages=[]) == []


def test_the_end_token_of_the_template_ends_an_answer(lm):
    end = lm.tokenizer.special_tokens["<|end|>"]
    assert end not in lm.eos_token_ids
    options = {"logit_bias": {end: 1000.0}, "max_tokens": 5, "temperature": 0}
    results = [mlxlm.generate(lm, messages=HELLO, **options), *mlxlm.batch(lm, messages=[HELLO], **options)]
    assert all((result.tokens, result.finish_reason) == ([end], "eos") for result in results)
    assert mlxlm.generate(lm, "Hello!", **options).tokens == [end] * 5


def test_a_model_without_a_template_needs_one(lm):
    lm.tokenizer.chat_template = None
    for use in (lambda **more: mlxlm.generate(lm, messages=HELLO, **more), lambda **more: one_of_batch(lm, **more)):
        with pytest.raises(GenerationError, match="no chat template.*`chat_template=chatml`"):
            use()
        assert use(chat_template="plain", **GREEDY).text == mlxlm.generate(lm, "Hello!", **GREEDY).text


def one_of_batch(lm, **options):
    return mlxlm.batch(lm, messages=[HELLO], **options)[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "neither prompt nor messages"),
        ({"prompt": "x", "messages": HELLO}, "there are prompt and messages"),
        ({"prompt": "x", "chat_template": "chatml"}, "a chat template needs messages"),
        ({"messages": []}, "there are no messages"),
        ({"messages": "Hello!"}, "messages is not a list"),
        ({"messages": HELLO[0]}, "messages is not a list"),
        ({"messages": ["Hello!"]}, "message 1 must have a role and a content"),
        ({"messages": [{"role": "user"}]}, "message 1 must have a role and a content"),
        ({"messages": [*HELLO, {"role": "bot", "content": ""}]}, "message 2 has the role 'bot'"),
        ({"messages": [{"role": "user", "content": None}]}, "content of message 1 is not a string"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "Hi."}]}, "the last message is not the user's"),
        ({"messages": HELLO, "temprature": 1}, "no option temprature"),
    ],
)
def test_invalid_arguments(lm, arguments, message):
    for function in (mlxlm.generate, mlxlm.stream):
        with pytest.raises(GenerationError, match=message):
            function(lm, **arguments)


def test_errors_of_a_batch_name_the_conversation(lm):
    with pytest.raises(GenerationError, match="conversation 2: message 1 must have"):
        mlxlm.batch(lm, messages=[HELLO, [{"role": "user"}]])
    with pytest.raises(GenerationError, match="conversation 1: message 1 must have"):
        mlxlm.batch(lm, messages=[["x"]])
    with pytest.raises(GenerationError, match="conversation 1: messages is not a list"):
        mlxlm.batch(lm, messages=HELLO)  # one conversation instead of a list of them
    with pytest.raises(TokenizerError, match="conversation 1: .*surrogate"):
        mlxlm.batch(lm, messages=[[{"role": "user", "content": "\ud800"}]])
    with pytest.raises(GenerationError, match="there are prompts and messages"):
        mlxlm.batch(lm, ["x"], messages=[HELLO])


def test_options_are_typed():
    """A misspelled option is an error for type checkers."""
    assert set(OptionArguments.__annotations__) == {field.name for field in fields(GenerationOptions)}
    for function in (mlxlm.stream, mlxlm.batch_as_completed, Chat.__init__, Chat.open):
        assert function.__annotations__["options"] == "Unpack[OptionArguments]", function
    for function, arguments in ((mlxlm.stream, StreamArguments), (mlxlm.batch_as_completed, BatchArguments)):
        assert {*arguments.__annotations__, "messages"} == {*OptionArguments.__annotations__, *function.__kwdefaults__}


def test_a_model_can_be_named_and_stays_loaded(model_folder, tmp_path, monkeypatch):
    loads = []
    original = loaded_model.load
    monkeypatch.setattr(loaded_model, "load", lambda path: loads.append(path) or original(path))
    first = mlxlm.generate(str(model_folder), "Hello", **GREEDY)
    assert mlxlm.generate(model_folder, "Hello", **GREEDY).tokens == first.tokens
    assert mlxlm.Chat(model_folder, **GREEDY).ask("Hello!").result().tokens
    assert mlxlm.score(model_folder, "Hello").tokens and mlxlm.embed(model_folder, "Hello").shape
    assert mlxlm.batch(model_folder, ["Hello"], **GREEDY)[0].tokens
    assert list(map(str, loads)) == [str(model_folder)]
    with pytest.raises(GenerationError, match="3 is not a model"):
        mlxlm.generate(3, "Hello")
    with pytest.raises(CheckpointError):
        mlxlm.generate("no/such-model.gguf", "Hello")


def test_a_pydantic_class_is_a_schema(lm):
    class Point(pydantic.BaseModel):
        x: Literal[1, 2]
        kind: Literal["a", "b"]

    result = mlxlm.generate(lm, "Hello", json_schema=Point, max_tokens=100)
    assert isinstance(Point.model_validate_json(result.text), Point)
    assert GenerationOptions(json_schema=Point).json_schema == json.dumps(Point.model_json_schema())
