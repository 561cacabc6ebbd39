"""LiteLLM, unchanged."""

from __future__ import annotations

import json
from typing import Literal

import pytest
from pydantic import BaseModel

from tests.server.conftest import CONTEXT, HELLO
from tests.server.test_tools import WEATHER, check_arguments

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:litellm.*")


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Ulm", "Rome"]


@pytest.fixture(scope="module")
def litellm():
    """The package, imported by the process that runs this file only: it takes seconds."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it fetches one
        module = pytest.importorskip("litellm", reason="litellm is not installed")
    module.suppress_debug_info = True  # it prints
    return module


@pytest.fixture
def options(litellm, live):
    address = {"model": "openai/tiny", "api_base": live + "/v1", "api_key": "none", "num_retries": 0}
    return {**address, **HELLO, "max_tokens": 8, "temperature": 0}


def test_completion(litellm, options):
    answer = litellm.completion(**options)
    assert answer.choices[0].message.content and answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 8
    chunks = list(litellm.completion(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 8


def test_tools(litellm, options):
    options |= {"tools": [WEATHER], "max_tokens": 400, "temperature": 1.0, "seed": 1}
    forced = {"tool_choice": "required", "parallel_tool_calls": False}
    message = litellm.completion(**options, **forced).choices[0].message
    [call] = message.tool_calls
    check_arguments(json.loads(call.function.arguments))
    chunks = list(litellm.completion(**options, **forced, stream=True))
    streamed = litellm.stream_chunk_builder(chunks).choices[0]
    assert streamed.finish_reason == "tool_calls"
    assert streamed.message.tool_calls[0].function == call.function
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain"}
    options |= {"messages": [*options["messages"], message, result], "max_tokens": 5}
    assert litellm.completion(**options).usage.completion_tokens == 5


def test_response_format(litellm, options):
    text = litellm.completion(**{**options, "max_tokens": 400}, response_format=Weather).choices[0].message.content
    assert Weather.model_validate_json(text)


def test_text_completion(litellm, options):
    del options["messages"]
    options |= {"model": "text-completion-openai/tiny", "prompt": "The quick"}
    answer = litellm.text_completion(**options)
    chunks = litellm.text_completion(**options, stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == answer.choices[0].text != ""


def test_responses(litellm, options):
    options = {name: options[name] for name in ("model", "api_base", "api_key", "temperature")}
    options |= {"input": "Hello!", "max_output_tokens": 8}
    [item] = litellm.responses(**options).output
    deltas = [event for event in litellm.responses(**options, stream=True) if event.type.endswith("text.delta")]
    assert "".join(event.delta for event in deltas) == item.content[0].text != ""


def test_messages(litellm, options, live):
    """Anthropic's API."""
    options |= {"model": "anthropic/tiny", "api_base": live}
    text = litellm.completion(**options).choices[0].message.content
    chunks = litellm.completion(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text != ""


def test_embedding(litellm, options):
    [vector] = litellm.embedding(input=["a"], **{name: options[name] for name in ("model", "api_base", "api_key")}).data
    assert len(vector["embedding"]) == 32


def test_errors(litellm, options):
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**{**options, "temperature": -1})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**options, "messages": [{"role": "user", "content": "fox " * CONTEXT}]})
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**options, "model": "openai/big"})
