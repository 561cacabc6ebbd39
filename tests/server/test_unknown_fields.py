"""Fields of requests that aren't ours: other servers' names and values, unknown fields, and a strict server."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from mlxlm.generation import GenerationOptions
from mlxlm.server.app import make_app
from mlxlm.server.endpoints.chat_completions import ChatCompletionRequest, ChatMessage
from mlxlm.server.other_servers import NAMES, UNSUPPORTED, WITHOUT_EFFECT
from mlxlm.server.schemas import SamplingFields, TemplateFields
from tests.server.apis import PATHS, body_for
from tests.server.conftest import HELLO
from tests.server.test_tools import WEATHER

SCHEMA = {"type": "object"}


@pytest.fixture
def logged(caplog):
    """`logged()`: the messages of the server about unknown fields so far."""
    caplog.set_level(logging.INFO, "mlxlm.server")
    return lambda: [message for message in caplog.messages if "ignoring" in message]


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"repeat_penalty": 1.1, "repeat_last_n": -1}, {"repetition_penalty": 1.1, "repetition_context_size": 16384}),
        ({"repetition_penalty": 0}, {"repetition_penalty": 1.0}),
        ({"repeat_penalty": 1.3, "repeat_last_n": 0}, {"repetition_penalty": 1.0, "repetition_context_size": 64}),
        ({"temperature": 1e-8}, {"temperature": 0.0}),
        ({"logit_bias": [[5, 1.5], [6, False]]}, {"logit_bias": {5: 1.5, 6: -100.0}}),
        ({"logit_bias": []}, {"logit_bias": {}}),
        ({"grammar": "", "guided_choice": "a"}, {"choice": ("a",), "grammar": None}),
        ({"num_predict": 5}, {"max_tokens": 5}),
        ({"n_predict": -1}, {"max_tokens": None}),
        ({"max_tokens": -2}, {"max_tokens": None}),
        ({"max_completion_tokens": 20.0}, {"max_tokens": 20}),
        ({"max_output_tokens": 7, "max_tokens": 7}, {"max_tokens": 7}),
        ({"seed": -1, "top_k": -1, "top_p": 0}, {"seed": None, "top_k": 0, "top_p": 1e-6}),
        ({"stop": ["", "a", ""]}, {"stop": ("a",)}),
        ({"stop": ""}, {"stop": ()}),
        ({"stop_sequences": ["a"]}, {"stop": ("a",)}),
        ({"guided_json": SCHEMA}, {"json_schema": '{"type": "object"}'}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ("a", "b")}),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, {"json_schema": '{"type": "object"}'}),
    ],
)
def test_names_and_values_of_other_servers(given, ours):
    options = SamplingFields.model_validate(given).options(GenerationOptions(max_tokens=None))
    assert {name: getattr(options, name) for name in ours} == ours


def test_every_other_name_is_of_one_of_our_fields():
    ours = {*SamplingFields.model_fields, *ChatMessage.model_fields}
    assert set(NAMES.values()) <= ours and not set(NAMES) & ours
    assert not WITHOUT_EFFECT & {*NAMES, *UNSUPPORTED, *SamplingFields.model_fields, *TemplateFields.model_fields}


def test_other_names_are_in_the_docs():
    page = (Path(__file__).parents[2] / "docs/server-api.md").read_text()
    assert all(f"`{name}`" in page for name in NAMES)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"n_predict": 3}, "n_predict"),
        ({"mirostat": 2}, "mirostat"),
        ({"images": ["aGk="]}, "images"),
        ({"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "messages.images"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": "a"}, "structured_outputs"),
        ({"grammar": 'root ::= "yes" | "no"'}, "grammar"),
        ({"guided_grammar": 'root ::= "yes" | "no"'}, "guided_grammar"),
        ({"guided_json": SCHEMA, "regex": "a"}, "guided_json"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
    ],
)
def test_what_would_change_the_text_is_refused(chat, fields, named):
    error = chat(**fields)["error"]
    assert error["param"] == named and error["type"] == "invalid_request_error"
    if "grammar" in named:
        assert "GBNF" in error["message"] and "Lark" in error["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("chat", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("chat", {"max_tokens": None, "n_predict": 1.5}, "n_predict"),
        ("chat", {"repeat_last_n": -5}, "repeat_last_n"),
        ("chat", {"guided_choice": []}, "guided_choice"),
        ("chat", {"guided_regex": "("}, "guided_regex"),
        ("chat", {"structured_outputs": {"json": {"type": "bool"}}}, "structured_outputs.json"),
        ("chat", {"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ("chat", {"response_format": {"type": "json_object", "schema": {"type": "bool"}}}, "response_format"),
        ("chat", {"messages": [{"role": "user", "content": "a", "thinking": 5}]}, "messages.0.thinking"),
        ("chat", {"keep_alive": True}, "keep_alive"),
        ("chat", {"think": 5}, "think"),
        ("completions", {"n_predict": 0}, "n_predict"),
        ("responses", {"max_output_tokens": 0}, "max_output_tokens"),
        ("responses", {"text": {"format": {"type": "json_schema", "schema": {"type": "bool"}}}}, "text.format"),
        ("messages", {"max_tokens": 1, "stop_sequences": [5]}, "stop_sequences.0"),
        ("ollama", {"options": {"num_predict": 0}}, "num_predict"),
    ],
)
def test_errors_name_the_field_that_was_sent(client, path, fields, param):
    inputs = {**HELLO, "prompt": "a"} if path == "completions" else HELLO
    body = {**({"input": "a"} if path == "responses" else inputs), **fields}
    response = client.post({**PATHS, "ollama": "/api/chat"}[path], json=body)
    error = response.json()["error"]
    message = error if path == "ollama" else error["message"]
    assert response.status_code == 400 and re.search(rf"(^|\W){param.rpartition('.')[2]}\b", message)
    assert "max_tokens" not in message.replace(param, "") and "json_schema" not in message
    assert path in ("ollama", "messages") or error["param"] == param


@pytest.mark.parametrize("api", [api for api in PATHS if api not in ("chat", "completions")])
def test_several_texts_are_refused_where_there_is_one(client, api):
    assert "n isn't supported" in client.post(PATHS[api], json=body_for(api, n=2)).json()["error"]["message"]
    assert client.post(PATHS[api], json=body_for(api, n=1, max_tokens=1)).status_code == 200


def test_an_unknown_field_is_logged_once(chat, logged):
    message = {"role": "user", "content": "Hi", "mood": "good"}
    for _ in range(2):
        assert "choices" in chat(messages=[message, message], temprature=1, mood=2, user="me", mirostat=0, max_tokens=1)
    endpoint = "of /v1/chat/completions"
    lines = [f"temprature {endpoint} (did you mean temperature?)", f"mood {endpoint}", f"messages.mood {endpoint}"]
    assert logged() == [f"ignoring the parameter {line}" for line in lines]


def test_the_log_of_unknown_fields_is_bounded(chat, logged, monkeypatch):
    monkeypatch.setattr("mlxlm.server.request_body._MAX_LOGGED", 5)
    chat(**{f"a{number}\n{'x' * 1000}": 1 for number in range(100)}, max_tokens=1)
    assert len(logged()) == 5 and all(len(line) < 200 and "\n" not in line for line in logged())


def test_a_strict_server_refuses_unknown_fields(models):
    with TestClient(make_app(models, strict=True)) as client:

        def ask(**fields):
            return client.post("/v1/chat/completions", json={**HELLO, "max_tokens": 1, **fields}).json()

        error = ask(temprature=1)["error"]
        assert (error["param"], error["code"]) == ("temprature", "unknown_parameter")
        assert error["message"] == "there is no parameter temprature (did you mean temperature?)"
        tool = {**WEATHER, "function": {**WEATHER["function"], "parametres": {}}}
        assert ask(tools=[tool])["error"]["param"] == "tools.function.parametres"
        assert "choices" in ask(user="me", metadata={"a": "b"}, store=False, repeat_penalty=1.1, stream=None)


@pytest.mark.parametrize(
    ("fields", "kwargs"),
    [
        ({}, {}),
        ({"reasoning_effort": "low", "verbosity": "high"}, {"reasoning_effort": "low", "verbosity": "high"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        ({"enable_thinking": False}, {"enable_thinking": False}),
        ({"think": True}, {"enable_thinking": True}),
        ({"think": "high"}, {"reasoning_effort": "high"}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, {}),
        ({"thinking": True}, {"enable_thinking": True}),
        ({"reasoning": {"effort": "low", "exclude": False}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        ({"think": True, "chat_template_kwargs": {"enable_thinking": False}}, {"enable_thinking": False}),
    ],
)
def test_variables_of_the_chat_template(fields, kwargs):
    assert ChatCompletionRequest.model_validate({**HELLO, **fields}).template_kwargs() == kwargs


def test_tokens_that_end_the_text(chat, served):
    bias = {"logit_bias": {str(min(served.eos_token_ids)): 1000}, "max_tokens": 3}
    assert chat(**bias)["usage"]["completion_tokens"] == 1
    ignored = chat(**bias, ignore_eos=True)
    assert ignored["usage"]["completion_tokens"] == 3 and ignored["choices"][0]["finish_reason"] == "length"
    other = chat(logit_bias={"70": 1000}, stop_token_ids=[70])
    assert other["usage"]["completion_tokens"] == 1 and other["choices"][0]["finish_reason"] == "stop"
    assert other["choices"][0]["message"]["content"] == ""


@pytest.mark.parametrize(
    ("api", "fields"), [*((api, {}) for api in PATHS), ("completions", {"max_tokens": 0, "echo": True})]
)
def test_keep_alive_is_for_the_model(client, models, monkeypatch, api, fields):
    given, use = [], models.use

    def recorded(name, keep_alive=None):
        given.append(keep_alive)
        return use(name, keep_alive)

    def ask(keep_alive):
        return client.post(PATHS[api], json={**body_for(api), **fields, "keep_alive": keep_alive})

    monkeypatch.setattr(models, "use", recorded)
    assert ask("5m").status_code == 200 and given == ["5m"]
    assert "keep_alive" in ask("soon").json()["error"]["message"]
