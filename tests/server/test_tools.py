"""Tool calls in all three APIs. The model is random; the grammar makes it call."""

from __future__ import annotations

import json

import pytest
from starlette.testclient import TestClient

from mlxlm.server.app import make_app
from tests.server.apis import PATHS, body_for
from tests.server.conftest import HELLO

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Ulm", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": PARAMETERS}}
NOTHING = {"type": "function", "function": {"name": "nothing", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
OTHER = {"type": "custom", "custom": {"name": "f"}}  # which this server leaves out
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Ulm", "days": 2}'},
}


def check_arguments(arguments):
    assert arguments["city"] in ("Ulm", "Rome") and 1 <= arguments["days"] <= 9


@pytest.fixture
def call(chat):
    def ask(**fields):
        return chat(
            tools=[WEATHER, NOTHING], temperature=1.0, seed=1, max_tokens=400, parallel_tool_calls=False, **fields
        )

    return ask


def test_a_call_has_openais_form(call):
    message = call(tool_choice=NAMED)["choices"][0]["message"]
    [made] = message["tool_calls"]
    assert message["content"] is None and made["id"] and made["type"] == "function"
    deltas = [chunk["choices"][0]["delta"] for chunk in call(tool_choice=NAMED, stream=True)[:-1]]
    first, *others = (delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta)
    assert first.pop("id") and all(delta.get("content") in (None, "") for delta in deltas)
    assert first == {"index": 0, "type": "function", "function": {"name": "get_weather", "arguments": ""}}
    assert all(set(part) == {"index", "function"} and part["index"] == 0 for part in others)


def test_required_and_allowed_tools(call):
    for choice, names in (
        ("required", {"get_weather", "nothing"}),
        ("any", {"get_weather", "nothing"}),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED, OTHER]}}, {"get_weather"}),
    ):
        [made] = call(tool_choice=choice)["choices"][0]["message"]["tool_calls"]
        assert made["function"]["name"] in names


def test_none_and_auto_without_a_call_are_text(call):
    message = call(tool_choice="none", max_completion_tokens=400)["choices"][0]["message"]
    assert message["content"] and "tool_calls" not in message


def test_results_go_back_to_the_model(chat, client):
    messages = [
        *HELLO["messages"],
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain until noon"},
    ]
    assert "choices" in chat(messages=messages, tools=[WEATHER])
    ids = client.post("/tokenize", json={"messages": messages, "tools": [WEATHER]}).json()["tokens"]
    prompt = client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert "get_weather" in prompt and "Rain until noon" in prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": "get_weather"}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": 5}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": ["a"]}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [1]}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": ["function"]}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": 5}, "tool_choice"),
        ({"tools": [{**WEATHER, "function": {"name": "a", "parameters": {"type": 5}}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "functions": [NOTHING["function"]]}, "functions"),
        ({"tools": [WEATHER], "regex": "a"}, "tools"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages.0.tool_calls.0.function"),
    ],
)
def test_invalid_tools(chat, fields, param):
    error = chat(**fields)["error"]
    assert error["param"] == param


LEFT_OUT = {
    "chat": ([OTHER], OTHER),
    "responses": (
        [{"type": kind, "name": "f"} for kind in ("web_search", "local_shell", "custom", "namespace")],
        {"type": "custom", "name": "f"},
    ),
    "messages": ([{"type": "web_search_20250305", "name": "web_search"}], {"type": "tool", "name": "web_search"}),
}


@pytest.mark.parametrize("api", LEFT_OUT)
def test_tools_that_the_server_does_not_run_are_left_out(client, models, caplog, api):
    caplog.set_level("INFO", "mlxlm.server")
    others, choice = LEFT_OUT[api]
    body = body_for(api, tools=[WEATHER], max_tokens=5)

    def ask(client=client, **fields):
        return client.post(PATHS[api], json={**body, **fields})

    def num_tokens(*tools):
        usage = ask(tools=list(tools)).json()["usage"]
        return usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)

    assert num_tokens(*others, *body["tools"]) == num_tokens(*body["tools"]) > num_tokens(*others) == num_tokens()
    ignored = [message for message in caplog.messages if "ignoring" in message]
    kinds = [tool["type"] for tool in others]
    assert ignored == [f"ignoring the parameter tools.type={kind} of {PATHS[api]}" for kind in kinds]
    refused = ask(tools=[*others, *body["tools"]], tool_choice=choice)
    assert refused.status_code == 400 and "a tool that this server doesn't run" in refused.json()["error"]["message"]
    with TestClient(make_app(models, strict=True)) as strict:
        assert ask(strict).status_code == 200 and ask(strict, tools=others).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_functions_as_before_tools(chat, stream):
    functions = [WEATHER["function"], NOTHING["function"]]
    fields = {"functions": functions, "temperature": 1.0, "seed": 1, "max_tokens": 400, "stream": stream}
    answer = chat(**fields, function_call={"name": "get_weather"})
    if stream:
        choices = [chunk["choices"][0] for chunk in answer[:-1]]
        calls = [choice["delta"].get("function_call", {}) for choice in choices]
        made = {key: "".join(call.get(key, "") for call in calls) for key in ("name", "arguments")}
        assert not any("tool_calls" in choice["delta"] for choice in choices)
    else:
        choices = answer["choices"]
        made = choices[0]["message"]["function_call"]
        assert "tool_calls" not in choices[0]["message"]
    assert made["name"] == "get_weather" and choices[-1]["finish_reason"] == "function_call"
    check_arguments(json.loads(made["arguments"]))
    call = {"name": "get_weather", "arguments": made["arguments"]}
    turns = [
        {"role": "assistant", "content": None, "function_call": call},
        {"role": "function", "name": "get_weather", "content": "Rain"},
    ]
    assert "choices" in chat(messages=HELLO["messages"] + turns, functions=functions, function_call="none")


def test_a_function_call_is_like_a_tool_call_in_the_prompt(client):
    def tokens(*turns):
        return client.post("/tokenize", json={"messages": [*HELLO["messages"], *turns, *HELLO["messages"]]}).json()[
            "tokens"
        ]

    assert tokens({"role": "assistant", "function_call": CALL["function"]}) == tokens(
        {"role": "assistant", "tool_calls": [CALL]}
    )
    result = {"role": "function", "name": "get_weather", "content": "Rain"}
    assert tokens(result) == tokens({**result, "role": "tool"})


def test_messages_that_are_sent_back_may_have_more_fields(client):
    def tokens(**fields):
        messages = [*HELLO["messages"], {"role": "assistant", "content": "Hi", **fields}, *HELLO["messages"]]
        response = client.post("/tokenize", json={"messages": messages})
        assert response.status_code == 200, response.text
        return response.json()["tokens"]

    more = {"id": "a", "annotations": [], "reasoning_details": [{"type": "reasoning.text"}], "audio": None}
    assert tokens(**more, mood="good") == tokens()
    assert tokens(reasoning="r") == tokens(reasoning_content="r") == tokens(thinking="r")
    arguments = {"tool_calls": [{**CALL, "function": {"name": "get_weather", "arguments": {"city": "Ulm", "days": 2}}}]}
    assert tokens(**arguments) == tokens(tool_calls=[CALL])
    calls = [[{**CALL, "function": {"name": "get_weather", "arguments": text}}] for text in ("", "{}")]
    assert tokens(tool_calls=calls[0]) == tokens(tool_calls=calls[1])
