"""OpenAI's Python client, unchanged."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel

QUESTION = [{"role": "user", "content": "Hello!"}]


class Weather(BaseModel):
    """The weather in a city."""

    city: Literal["Ulm", "Rome"]


@pytest.fixture(scope="module")
def openai():
    """The client; importing it takes seconds, so that only the worker that tests it does."""
    return pytest.importorskip("openai", reason="the openai client is not installed")


@pytest.fixture
def api(live, openai):
    with openai.OpenAI(base_url=live + "/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat_completions(api):
    options = {"model": "tiny", "messages": QUESTION, "max_completion_tokens": 8, "temperature": 0}
    answer = api.chat.completions.create(**options)
    assert answer.choices[0].finish_reason == "length" and answer.choices[0].message.content
    assert answer.usage.completion_tokens == 8 and answer.usage.prompt_tokens_details.cached_tokens >= 0
    text, usage = "", None
    for chunk in api.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
    assert text == answer.choices[0].message.content and usage.completion_tokens == 8
    options = {"model": "tiny", "messages": QUESTION, "extra_body": {"choice": ["yes", "no"]}}
    with api.chat.completions.stream(**options) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        assert stream.get_final_completion().choices[0].message.content == text in ("yes", "no")


def test_parse(api):
    answer = api.chat.completions.parse(model="tiny", messages=QUESTION, response_format=Weather)
    assert answer.choices[0].message.parsed.city in ("Ulm", "Rome")
    answer = api.responses.parse(model="tiny", input="Which?", text_format=Weather)
    assert answer.output_parsed.city in ("Ulm", "Rome")


def test_completions(api):
    answer = api.completions.create(model="tiny", prompt=["a", "b"], max_tokens=4, logprobs=2)
    assert len(answer.choices) == 2 and len(answer.choices[0].logprobs.tokens) == 4


def test_models(api):
    assert [model.id for model in api.models.list()] == ["tiny"] and api.models.retrieve("tiny").id == "tiny"


def test_errors(api, openai):
    with pytest.raises(openai.NotFoundError, match="model 'big' not found"):
        api.chat.completions.create(model="big", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as error:
        api.chat.completions.create(model="tiny", messages=QUESTION, temperature=-1)
    assert error.value.param == "temperature"


def test_responses(api):
    answer = api.responses.create(model="tiny", input="Hello!", max_output_tokens=8, temperature=0)
    assert answer.status == "incomplete" and answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text and answer.usage.output_tokens == 8
    again = api.responses.create(
        model="tiny",
        instructions="Be brief.",
        input=[*QUESTION, *[item.model_dump() for item in answer.output], {"role": "user", "content": "More"}],
        max_output_tokens=8,
    )
    assert again.output_text


def test_responses_stream(api):
    options = {"model": "tiny", "input": "Hello!", "max_output_tokens": 8, "temperature": 0}
    events = list(api.responses.create(**options, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == api.responses.create(**options).output_text == events[-1].response.output_text
    # The helper only returns responses that are complete.
    with api.responses.stream(model="tiny", input="Hello!", extra_body={"choice": ["yes"]}) as stream:
        assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == "yes"
        assert stream.get_final_response().output_text == "yes"


def test_embeddings(api):
    [vector] = api.embeddings.create(model="tiny", input="a").data  # in base64
    assert len(vector.embedding) == 32 and sum(x * x for x in vector.embedding) == pytest.approx(1)


def test_tools(api, openai):
    function = openai.pydantic_function_tool(Weather, name="get_weather")
    options = {"model": "tiny", "messages": QUESTION, "tools": [function], "tool_choice": "required", "seed": 1}
    options |= {"parallel_tool_calls": False}
    [call] = api.chat.completions.parse(**options).choices[0].message.tool_calls
    assert call.function.name == "get_weather" and call.function.parsed_arguments.city in ("Ulm", "Rome")
    with api.chat.completions.stream(**options) as stream:
        kinds = {event.type for event in stream}
        [streamed] = stream.get_final_completion().choices[0].message.tool_calls
    assert "tool_calls.function.arguments.done" in kinds
    assert streamed.function.parsed_arguments == call.function.parsed_arguments


def test_tools_of_responses(api, openai):
    tools = [openai.pydantic_function_tool(Weather, name="get_weather")["function"] | {"type": "function"}]
    options = {
        "model": "tiny",
        "input": "Hello!",
        "tools": tools,
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }
    with api.responses.stream(**options) as stream:
        for _ in stream:
            pass
        [call] = stream.get_final_response().output
    assert call.type == "function_call" and Weather.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}
    conversation = [*QUESTION, call.model_dump(exclude={"parsed_arguments"}), result]
    assert api.responses.create(model="tiny", input=conversation, tools=tools, max_output_tokens=5).output
