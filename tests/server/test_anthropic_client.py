"""Anthropic's Python client, unchanged."""

from __future__ import annotations

import httpx
import pytest

OPTIONS = {
    "model": "tiny",
    "max_tokens": 8,
    "messages": [{"role": "user", "content": "Hello!"}],
    "extra_body": {"temperature": 0},
}


@pytest.fixture(scope="module")
def anthropic():
    """The client; importing it takes seconds, so that only the worker that tests it does."""
    return pytest.importorskip("anthropic", reason="the anthropic client is not installed")


@pytest.fixture
def api(live, anthropic):
    with anthropic.Anthropic(base_url=live, api_key="none", max_retries=0) as client:
        yield client


def test_messages(api):
    answer = api.messages.create(**OPTIONS)
    assert answer.stop_reason == "max_tokens" and answer.usage.output_tokens == 8
    assert answer.content[0].type == "text" and answer.content[0].text
    used = answer.usage.input_tokens + answer.usage.cache_read_input_tokens
    assert used == api.messages.count_tokens(model="tiny", messages=OPTIONS["messages"]).input_tokens


def test_stream(api):
    text = api.messages.create(**OPTIONS).content[0].text
    with api.messages.stream(**OPTIONS) as stream:
        assert "".join(stream.text_stream) == text
        message = stream.get_final_message()
    assert message.stop_reason == "max_tokens" and message.content[0].text == text and message.usage.output_tokens == 8
    kinds = [event.type for event in api.messages.create(**OPTIONS, stream=True)]
    middle = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert list(dict.fromkeys(kinds)) == ["message_start", *middle, "message_delta", "message_stop"]


def test_stop_sequence(api):
    text = api.messages.create(**OPTIONS).content[0].text
    answer = api.messages.create(**OPTIONS, stop_sequences=["no such text", text[2:4]])
    assert answer.stop_reason == "stop_sequence" and answer.stop_sequence == text[2:4]
    assert answer.content[0].text == text[: text.index(text[2:4])]


def test_tools(api):
    schema = {"type": "object", "properties": {"city": {"enum": ["Ulm", "Rome"]}}, "required": ["city"]}
    tools = [{"name": "get_weather", "description": "The weather.", "input_schema": schema}]
    choice = {"type": "any", "disable_parallel_tool_use": True}
    options = {**OPTIONS, "max_tokens": 400, "tools": tools, "extra_body": {"seed": 1, "temperature": 1.0}}
    [call] = api.messages.create(**options, tool_choice=choice).content
    assert call.type == "tool_use" and call.input["city"] in ("Ulm", "Rome")
    with api.messages.stream(**options, tool_choice=choice) as stream:
        message = stream.get_final_message()
    assert message.stop_reason == "tool_use" and message.content[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain"}
    turns = [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]
    options |= {"messages": [*OPTIONS["messages"], *turns], "max_tokens": 5}
    assert api.messages.create(**options).usage.output_tokens == 5


def test_fields_of_coding_agents(api, anthropic):
    edits = [{"type": "clear_thinking_20251015", "keep": "all"}]
    extra = {
        "context_management": {"edits": edits},
        "output_config": {"effort": "low"},
        "thinking": {"type": "adaptive"},
    }
    assert api.messages.create(**{**OPTIONS, "extra_body": extra}).content
    extra["context_management"] = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    with pytest.raises(anthropic.BadRequestError, match="can only clear earlier thinking"):
        api.messages.create(**{**OPTIONS, "extra_body": extra})


def test_errors(api, anthropic):
    with pytest.raises(anthropic.NotFoundError) as error:
        api.messages.create(**{**OPTIONS, "model": "big"})
    assert error.value.body["error"]["type"] == "not_found_error"
    image = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match="only reads text"):
        api.messages.create(**{**OPTIONS, "messages": [{"role": "user", "content": [image]}]})


def test_requests_and_models_have_anthropics_form(api):
    answer = api.messages.create(**OPTIONS)
    assert answer._request_id and answer._request_id.startswith("req_")
    [model] = api.models.list()
    assert model.id == model.display_name == "tiny" and model.type == "model" and model.created_at.tzinfo is not None
    assert api.models.retrieve("tiny") == model


def test_what_anthropics_servers_would_do_is_left_out(api, caplog, anthropic):
    caplog.set_level("INFO", "mlxlm.server")
    schema = {"type": "object", "properties": {}}
    cached = {"cache_control": {"type": "ephemeral"}}
    tool = {"name": "f", "input_schema": schema, "defer_loading": True, "input_examples": [{}], **cached}
    results = [{"type": "web_search_tool_result", "tool_use_id": "s", "content": []}]
    turns = [{"role": "assistant", "content": results}, {"role": "user", "content": "And?"}]
    system = [{"type": "text", "text": "Be brief.", **cached}]
    body = {"messages": [*OPTIONS["messages"], *turns], "system": system, "model": "tiny"}
    extra = {"mcp_servers": [], **cached}
    counts = [
        api.messages.count_tokens(**body, tools=tools, extra_body=extra).input_tokens
        for tools in ([tool], [{"name": "f", "input_schema": schema}])
    ]
    assert len(set(counts)) == 1 and counts[0] > api.messages.count_tokens(**body).input_tokens
    assert api.messages.create(**body, tools=[tool], max_tokens=1, extra_body=extra).content
    ignored = [message.partition(" of ")[0] for message in caplog.messages if "ignoring" in message]
    assert ignored == ["ignoring the parameter messages.content.type=web_search_tool_result"]
    with pytest.raises(anthropic.BadRequestError, match="mcp_servers isn't supported"):
        api.messages.create(**OPTIONS | {"extra_body": {"mcp_servers": [{"url": "https://example.org"}]}})


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a\nb"}}, "a\nb"),
        (
            {
                "type": "document",
                "title": "T",
                "context": "C",
                "source": {"type": "content", "content": [{"type": "text", "text": "a"}]},
                "citations": {"enabled": True},
            },
            "T\nC\na",
        ),
        ({"type": "search_result", "title": "T", "source": "S", "content": [{"type": "text", "text": "a"}]}, "T\nS\na"),
    ],
)
def test_documents_in_plain_text(api, block, text):
    def count(content):
        return api.messages.count_tokens(model="tiny", messages=[{"role": "user", "content": content}]).input_tokens

    assert count([block]) == count(text) > count("")
    result = {"type": "tool_result", "tool_use_id": "a"}
    assert count([{**result, "content": [block]}]) == count([{**result, "content": text}])


def test_other_documents_are_refused(api, anthropic):
    source = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    for content in ([{"type": "document", "source": source}], [{"type": "text"}], [{"type": "tool_use", "id": "a"}]):
        with pytest.raises(anthropic.BadRequestError, match="only reads text|has no"):
            api.messages.create(**{**OPTIONS, "messages": [{"role": "user", "content": content}]})


def test_the_former_name_of_a_format(api):
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
    extra = {"output_format": {"type": "json_schema", "schema": schema}}
    assert api.messages.create(**OPTIONS | {"extra_body": extra, "max_tokens": 60}).content[0].text == '{"a": "x"}'


def test_only_an_answer_needs_max_tokens(live):
    body = {"model": "tiny", "messages": OPTIONS["messages"], "temperature": 0.5, "stop_sequences": ["a"]}
    assert httpx.post(f"{live}/v1/messages/count_tokens", json=body).json()["input_tokens"] > 0
    assert "max_tokens is missing" in httpx.post(f"{live}/v1/messages", json=body).json()["error"]["message"]
