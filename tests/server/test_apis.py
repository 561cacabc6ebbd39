"""What the APIs that generate text have in common."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from mlxlm.server.app import make_app
from mlxlm.server.models import Models, ModelSettings, ServedModel
from mlxlm.server.text import Text
from mlxlm.utils.errors import GenerationError
from tests.server.apis import PATHS, ask, body_for, events
from tests.server.test_tools import NOTHING, WEATHER, check_arguments

CONVERSATIONS = [api for api in PATHS if api != "completions"]
STREAM = pytest.mark.parametrize("stream", [False, True])


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.3, "seed": 5}, {"choice": ["yes", "no"]}, {"logprobs": 0}])
@pytest.mark.parametrize("api", PATHS)
def test_a_stream_says_the_same(client, api, fields):
    if api == "completions":
        fields = {name: value for name, value in fields.items() if name != "logprobs"}
    whole = ask(client, api, **fields)
    assert ask(client, api, stream=True, **fields) == whole and whole.text
    assert whole.finish_reason == ("stop" if "choice" in fields else "length")


@STREAM
@pytest.mark.parametrize("api", [api for api in PATHS if api != "responses"])
def test_stop_ends_the_text(client, api, stream):
    whole = ask(client, api).text
    stopped = ask(client, api, stop=["no such text", whole[3:6]], stream=stream)
    assert (stopped.text, stopped.finish_reason) == (whole[: whole.index(whole[3:6])], "stop")


@STREAM
@pytest.mark.parametrize("api", CONVERSATIONS)
def test_a_named_call(client, api, stream):
    """The model is random; the grammar makes it call."""
    tools, fields = [WEATHER, NOTHING], {"temperature": 1.0, "seed": 1, "stream": stream}
    answer = ask(client, api, tools=tools, call="get_weather", max_tokens=400, **fields)
    check_arguments(json.loads(answer.arguments))
    assert answer.text == "" and answer.finish_reason == "tool_calls"
    cut_off = ask(client, api, tools=[WEATHER], call="get_weather", max_tokens=40, stream=stream)
    assert cut_off.finish_reason == "length"


@pytest.mark.parametrize("stop", [None, ["e"]])
@STREAM
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_logprobs_add_up_to_the_text(client, api, stream, stop):
    fields = {} if stop is None else {"stop": stop} if api == "chat" else {"regex": "[a-z]{9}"}
    answer = ask(client, api, logprobs=2, stream=stream, temperature=1.0, seed=3, max_tokens=40, **fields)
    spelled = b"".join(bytes(entry["bytes"]) for entry in answer.logprobs)
    assert answer.text and spelled.decode("utf-8", "replace").startswith(answer.text)
    assert stop or spelled.decode("utf-8", "replace") == answer.text and len(answer.logprobs) == 40
    assert len(spelled) - len(answer.logprobs[-1]["bytes"]) < len(answer.text.encode())  # no token after the text
    for entry in answer.logprobs:
        assert entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0]["logprob"] >= entry["top_logprobs"][1]["logprob"]


@pytest.mark.parametrize("api", PATHS)
def test_an_error_after_the_first_event_has_the_form_of_the_api(client, api, monkeypatch):
    push = Text.push

    def failing(text, chunk):
        if text.parts:
            raise GenerationError("the sky is falling", "an umbrella")
        return push(text, chunk)

    monkeypatch.setattr(Text, "push", failing)
    response = client.post(PATHS[api], json={**body_for(api), "stream": True})
    *_, last = events(response.text)
    message = "the sky is falling (try: an umbrella)"
    if api == "responses":
        assert last["response"]["status"] == "failed" and last["type"] == "response.failed"
        assert last["response"]["error"] == {"code": "server_error", "message": message}
    else:
        assert last["error"]["message"] == message and last["error"]["type"] == "invalid_request_error"
        assert ("event: error\n" in response.text) == (api == "messages") == (last.get("type") == "error")


@pytest.fixture(scope="module")
def thinking(lm):
    """A model whose template opens a block of reasoning, which this model never closes."""
    tokens = copy.copy(lm.tokenizer)
    tokens.chat_template = lm.tokenizer.chat_template.replace("<|assistant|>\n", "<|assistant|>\n<think>\n")
    model = ServedModel("thinking", replace(lm, tokenizer=tokens), ModelSettings())
    models = Models({"thinking": ""}, model.settings)
    models.add(model)
    yield TestClient(make_app(models))
    model.engine.close()


@STREAM
@pytest.mark.parametrize("api", CONVERSATIONS)
def test_reasoning_is_separate(thinking, api, stream):
    answer = ask(thinking, api, stream=stream)
    assert answer.text == "" and answer.reasoning == ask(thinking, api).reasoning != ""
    constrained = ask(thinking, api, choice=["yes", "no"], stream=stream)  # it has no reasoning
    assert constrained.text in ("yes", "no") and constrained.reasoning == ""


def test_a_constrained_answer_closes_the_block_first(thinking):
    bodies = [body_for("chat", **fields) for fields in ({}, {"choice": ["yes"]})]
    plain, constrained = (thinking.post(PATHS["chat"], json=body).json()["usage"]["prompt_tokens"] for body in bodies)
    assert constrained > plain
