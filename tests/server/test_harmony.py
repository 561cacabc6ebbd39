"""A GPT-OSS that is made to reason, to answer and to call, in all APIs and with OpenAI's client."""

import json

import pytest
from starlette.testclient import TestClient

from mlxlm.server.app import make_app
from mlxlm.server.models import Models, ModelSettings, ServedModel
from tests.chat.test_harmony import (  # noqa: F401 - fixtures
    ANALYSIS,
    CALL,
    FINAL,
    NEXT,
    SCHEMA,
    THOUGHT,
    gpt_oss,
    scripted,
    tokens,
)
from tests.server.apis import PATHS, ask, body_for
from tests.server.conftest import running

PARAMETERS = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 4}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "description": "Look.", "parameters": PARAMETERS}}
CONVERSATIONS = [api for api in PATHS if api != "completions"]


@pytest.fixture(scope="module")
def served(gpt_oss):  # noqa: F811
    lm = scripted(gpt_oss, THOUGHT)
    lm.model.add(f"{ANALYSIS}Hm.{NEXT}{CALL}", "Look!<|end|><|start|>assistant", "<|call|>")
    lm.model.add(f'{ANALYSIS}Hm.{NEXT}{FINAL}{{"ok": true}}', "JSON!<|end|><|start|>assistant", "<|return|>")
    model = ServedModel("tiny", lm, ModelSettings(prefix_cache_bytes=0))
    yield model
    model.engine.close()


@pytest.fixture(scope="module")
def app(served):
    models = Models({"tiny": ""}, served.settings)
    models.add(served)
    return make_app(models)


@pytest.fixture(scope="module")
def client(app):
    return TestClient(app)


def prompt_of(served):
    """The text that the model has read and written last."""
    return served.lm.tokenizer.decode(served.lm.model.text, skip_special_tokens=False)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", CONVERSATIONS)
def test_reasoning_text_and_calls(client, api, stream):
    options = {"stream": stream, "max_tokens": 200}
    answer = ask(client, api, **options)
    assert (answer.reasoning, answer.text, answer.finish_reason) == ("Hm, a fox.", "The fox.", "stop")
    answer = ask(client, api, choice=["yes"], **options)
    assert (answer.reasoning, answer.text) == ("", "yes")
    answer = ask(client, api, tools=[TOOL], question="Look!", **options)
    assert (answer.reasoning, answer.text, answer.finish_reason) == ("Hm.", "", "tool_calls")
    assert json.loads(answer.arguments) == {"a": "<b|>"}


@pytest.mark.parametrize("stream", [False, True])
def test_ollama(client, served, stream):
    question = {"messages": [{"role": "user", "content": "Look!"}], "tools": [TOOL], "think": "low"}
    response = client.post(
        "/api/chat", json={"model": "tiny", **question, "options": {"temperature": 0}, "stream": stream}
    )
    messages = [json.loads(line)["message"] for line in response.text.splitlines()]
    assert "".join(message.get("thinking", "") for message in messages) == "Hm."
    [call] = [call for message in messages for call in message.get("tool_calls", ())]
    assert call["function"] == {"name": "f", "arguments": {"a": "<b|>"}}
    assert "<|start|>system<|message|>Reasoning: low<|end|>" in prompt_of(served)
    assert "thinking" in client.post("/api/show", json={"model": "tiny"}).json()["capabilities"]


@pytest.mark.parametrize(
    ("api", "fields"),
    [
        ("chat", {"reasoning_effort": "high"}),
        ("responses", {"reasoning": {"effort": "high"}}),
        ("messages", {"output_config": {"effort": "high"}}),
    ],
)
def test_the_effort_reaches_the_template(client, served, api, fields):
    client.post(PATHS[api], json={**body_for(api, max_tokens=2), **fields})
    assert "<|start|>system<|message|>Reasoning: high<|end|>" in prompt_of(served)


def test_an_answer_is_continued(client, served):
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The"}]
    served.lm.model.add(" fox.", "Hi<|end|><|start|>assistant" + FINAL + "The", "<|return|>")
    for tools in ((), (TOOL,)):
        body = body_for("chat", tools, max_tokens=100) | {"messages": messages}
        message = client.post(PATHS["chat"], json=body).json()["choices"][0]["message"]
        assert message["content"] == " fox." and "reasoning_content" not in message


def test_openais_client(app):
    openai = pytest.importorskip("openai", reason="the openai client is not installed")
    look = [{"role": "user", "content": "Look!"}]
    options = {"model": "tiny", "temperature": 0}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    with running(app) as address, openai.OpenAI(base_url=address + "/v1", api_key="-", max_retries=0) as api:
        first = api.chat.completions.create(**options, messages=look, tools=[TOOL]).choices[0]
        assert first.finish_reason == "tool_calls" and first.message.reasoning_content == "Hm."
        [call] = first.message.tool_calls
        assert (call.function.name, call.function.arguments) == ("f", '{"a": "<b|>"}')
        result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        answered = [*look, first.message.model_dump(exclude_none=True), result]
        answer = api.chat.completions.create(**options, messages=answered, tools=[TOOL]).choices[0].message
        assert (answer.reasoning_content, answer.content, answer.tool_calls) == ("Hm, a fox.", "The fox.", None)
        with api.chat.completions.stream(**options, messages=look, tools=[TOOL]) as stream:
            [call] = stream.get_final_completion().choices[0].message.tool_calls
        assert call.function.arguments == '{"a": "<b|>"}'
        chunks = api.chat.completions.create(**options, messages=answered, tools=[TOOL], stream=True)
        deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "The fox."
        assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == "Hm, a fox."
        asked = [{"role": "user", "content": "JSON!"}]
        answer = api.chat.completions.create(**options, messages=asked, response_format=form).choices[0].message
        assert (answer.reasoning_content, answer.content) == ("Hm.", '{"ok": true}')
        response = api.responses.create(**options, input="Look!", tools=[{"type": "function", **TOOL["function"]}])
        assert [item.type for item in response.output] == ["reasoning", "function_call"]
        text = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
        assert api.responses.create(**options, input="JSON!", text=text).output_text == '{"ok": true}'
