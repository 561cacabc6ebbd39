"""ollama's API: the requests are those of its Python and JavaScript clients."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from functools import partial

import pytest
from starlette.testclient import TestClient

from mlxlm.checkpoint.local_models import HUB, LocalModel
from mlxlm.server import reply
from mlxlm.server.app import make_app
from mlxlm.server.conversation import ToolUse
from mlxlm.server.endpoints.ollama_models import VERSION
from mlxlm.server.models import Models, ModelSettings
from tests.server.conftest import CONTEXT, HELLO, wait_until
from tests.server.test_tools import NOTHING, PARAMETERS, WEATHER, check_arguments

GREEDY = {"options": {"temperature": 0, "num_predict": 20}}
TOTALS = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"}


def lines(response) -> list:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


@pytest.fixture
def chat(client):
    def ask(stream: bool = False, **fields):
        response = client.post("/api/chat", json={"model": "tiny", **HELLO, **GREEDY, "stream": stream, **fields})
        return lines(response) if stream else response.json()

    return ask


@pytest.fixture
def generate(client):
    def ask(**fields):
        return client.post("/api/generate", json={"model": "tiny", **GREEDY, "stream": False, **fields}).json()

    return ask


def test_chat(chat, client):
    answer = chat()
    assert set(answer) == {"model", "created_at", "message", "done", "done_reason"} | TOTALS
    assert answer["model"] == "tiny" and datetime.fromisoformat(answer["created_at"]).tzinfo
    assert answer["done"] is True and answer["done_reason"] == "length" and answer["eval_count"] == 20
    assert 0 < answer["eval_duration"] <= answer["total_duration"] > 1e6  # more than a millisecond
    assert isinstance(answer["prompt_eval_duration"], int)
    expected = client.post("/v1/chat/completions", json={**HELLO, "temperature": 0, "max_tokens": 20}).json()
    assert answer["message"] == {"role": "assistant", "content": expected["choices"][0]["message"]["content"]}
    assert answer["prompt_eval_count"] == expected["usage"]["prompt_tokens"]


def test_streaming_is_the_default(chat, client):
    events = lines(client.post("/api/chat", json={"model": "tiny", **HELLO, **GREEDY}))
    *parts, last = events
    assert len(parts) > 5 and not any(event["done"] for event in parts)
    assert "".join(event["message"]["content"] for event in events) == chat()["message"]["content"]
    assert last["done"] is True and set(last) >= TOTALS and last["message"]["content"] == ""


def test_idle_streams_stay_open_without_comments(chat, monkeypatch):
    monkeypatch.setattr(reply, "KEEP_ALIVE_SECONDS", 0.0)
    events = chat(stream=True)
    assert "".join(event["message"]["content"] for event in events) == chat()["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_whole_objects(chat, stream, monkeypatch):
    monkeypatch.setattr("mlxlm.server.endpoints.ollama.ToolUse", partial(ToolUse, choice="required"))  # it is random
    options = {"temperature": 1, "seed": 1, "num_predict": 400}
    answer = chat(stream, tools=[WEATHER, NOTHING], options=options)
    calls = [call for event in (answer if stream else [answer]) for call in event["message"].get("tool_calls", ())]
    assert calls and len({call["id"] for call in calls}) == len(calls)
    for call in calls:
        assert set(call["function"]) == {"name", "arguments"}
        if call["function"]["name"] == "get_weather":
            check_arguments(call["function"]["arguments"])
        else:
            assert call["function"]["arguments"] == {}


def test_results_of_calls(chat, models):
    messages = [
        *HELLO["messages"],
        {"role": "assistant", "content": "", "thinking": "I see", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_name": "get_weather", "content": "Rain"},
        {"role": "tool", "content": "Sun"},
    ]
    seen = []
    [model] = models.loaded
    encode = model.encoder.encode
    model.encoder.encode = lambda messages, **options: seen.extend(messages) or encode(messages, **options)
    try:
        assert chat(messages=messages, tools=[WEATHER])["done"]
    finally:
        del model.encoder.encode
    first, second = seen[1].tool_calls
    assert first.arguments == '{"city": "Ulm", "days": 2}' and first.id != second.id
    assert [message.tool_call_id for message in seen[2:]] == [first.id, second.id]
    assert seen[2].name == "get_weather" and seen[1].reasoning_content == "I see"


CALL = {"function": {"name": "get_weather", "arguments": {"city": "Ulm", "days": 2}}}


def test_formats(chat, generate):
    limits = {"options": {"temperature": 0, "num_predict": 400}}
    check_arguments(json.loads(chat(format=PARAMETERS, **limits)["message"]["content"]))
    assert generate(prompt="a", format="json")["response"].startswith("{")
    assert chat(format="")["message"]["content"] == chat()["message"]["content"]


def test_logprobs(chat):
    whole, events = chat(logprobs=True, top_logprobs=2), chat(stream=True, logprobs=True, top_logprobs=2)
    assert len(whole["logprobs"]) == 20 and len(whole["logprobs"][0]["top_logprobs"]) == 2
    assert [entry for event in events for entry in event.get("logprobs", ())] == whole["logprobs"]


def test_generate(generate, client):
    answer = generate(prompt="Hello!")
    assert set(answer) == {"model", "created_at", "response", "done", "done_reason", "context"} | TOTALS
    asked = client.post("/api/chat", json={"model": "tiny", **HELLO, **GREEDY, "stream": False}).json()
    assert answer["response"] == asked["message"]["content"]
    assert generate(prompt="Hello!", system="Be brief.")["response"] != answer["response"]
    events = lines(client.post("/api/generate", json={"model": "tiny", "prompt": "Hello!", **GREEDY}))
    assert "".join(event["response"] for event in events) == answer["response"]
    assert events[-1]["context"] == answer["context"]


def test_context_continues_a_conversation(generate, lm):
    first = generate(prompt="Hello!")
    second = generate(prompt="How are you?", context=first["context"])
    assert second["context"][: len(first["context"])] == first["context"]
    whole = lm.tokenizer.decode(second["context"], skip_special_tokens=False)
    assert "Hello!" in whole and "How are you?" in whole and first["response"] in whole
    assert second["prompt_eval_count"] > first["prompt_eval_count"] + 20


def test_raw_prompts_are_continued_with_their_special_tokens(generate, client, lm):
    answer = generate(prompt="The quick", raw=True)
    completed = client.post("/v1/completions", json={"prompt": "The quick", "temperature": 0, "max_tokens": 20}).json()
    assert answer["response"] == completed["choices"][0]["text"] and "context" not in answer
    assert generate(prompt="<|end|>", raw=True)["prompt_eval_count"] < len(lm.tokenizer.encode("<|end|>"))


def test_options(generate):
    texts = {generate(prompt="a", raw=True, options={"seed": seed, "num_predict": 9})["response"] for seed in (1, 2)}
    assert len(texts) == 2
    options = {"num_predict": -1, "stop": ["\n"], "num_ctx": 4096, "repeat_penalty": 1.1, "num_gpu": 1, "top_k": 40}
    assert generate(prompt="a", raw=True, options={**options, "num_predict": 3})["eval_count"] == 3


def test_thinking(client, models):
    [model] = models.loaded
    original = model.encoder.generation_prefix_of
    model.encoder.generation_prefix_of = lambda prompt: "<think>\n"
    try:
        body = {"model": "tiny", **HELLO, **GREEDY, "think": True}
        whole = client.post("/api/chat", json={**body, "stream": False}).json()["message"]
        events = lines(client.post("/api/chat", json=body))
        named = client.post("/api/chat", json={**body, "think": "high", "stream": False}).json()["message"]
    finally:
        model.encoder.generation_prefix_of = original
    assert whole["content"] == "" and whole["thinking"] == named["thinking"]
    assert "".join(event["message"].get("thinking", "") for event in events) == whole["thinking"]


@pytest.fixture
def unloaded(model_folder):
    """A client of a server that has loaded nothing yet."""
    with TestClient(make_app(Models({"tiny": str(model_folder)}, ModelSettings()))) as client:
        yield client


def test_requests_without_a_prompt_load_and_unload(unloaded):
    client = unloaded

    def post(path, **fields):
        answer = client.post(path, json={"model": "tiny", **fields}).json()
        assert answer["done"] is True
        return answer["done_reason"], [model["name"] for model in client.get("/api/ps").json()["models"]]

    assert post("/api/generate") == ("load", ["tiny:latest"])
    assert post("/api/generate", keep_alive=0) == ("unload", [])
    assert post("/api/chat", messages=[], keep_alive="5m") == ("load", ["tiny:latest"])
    [model] = client.get("/api/ps").json()["models"]
    left = datetime.fromisoformat(model["expires_at"]) - datetime.now().astimezone()
    assert 200 < left.total_seconds() <= 300
    assert post("/api/chat", keep_alive=-1)[0] == "load"
    assert client.get("/api/ps").json()["models"][0]["expires_at"].startswith("2318")
    client.post("/api/chat", json={**HELLO, **GREEDY, "keep_alive": 0, "stream": False})
    assert wait_until(lambda: not client.app.state.models.loaded)


def test_embeddings(client):
    expected = client.post("/v1/embeddings", json={"input": ["one", "two"]}).json()
    answer = client.post("/api/embed", json={"model": "tiny", "input": ["one", "two"]}).json()
    assert answer["embeddings"] == [entry["embedding"] for entry in expected["data"]]
    assert answer["prompt_eval_count"] == expected["usage"]["prompt_tokens"] and answer["total_duration"] > 0
    assert client.post("/api/embed", json={"input": "one"}).json()["embeddings"] == answer["embeddings"][:1]
    older = client.post("/api/embeddings", json={"model": "tiny", "prompt": "one"}).json()
    assert older == {"embedding": answer["embeddings"][0]}
    assert client.post("/api/embeddings", json={"prompt": ""}).json() == {"embedding": []}  # loads the model
    assert client.post("/api/embed", json={"input": ""}).json()["embeddings"] == []


def test_long_texts_are_truncated_for_embeddings(client):
    answer = client.post("/api/embed", json={"input": "fox " * CONTEXT})
    assert 0.9 * CONTEXT < answer.json()["prompt_eval_count"] <= CONTEXT
    assert client.post("/api/embed", json={"input": "fox " * CONTEXT, "truncate": False}).status_code == 400


@pytest.mark.parametrize(
    ("path", "fields", "problem"),
    [
        ("/api/chat", {"model": "nothing", **HELLO}, "model 'nothing' not found"),
        ("/api/chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "images isn't supported"),
        ("/api/generate", {"prompt": "a", "images": ["aGk="]}, "images isn't supported"),
        ("/api/generate", {"prompt": "a", "template": "{{ .Prompt }}"}, "template isn't supported"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, "can't fill in the middle"),
        ("/api/generate", {"prompt": "a", "options": {"mirostat": 1}}, "mirostat isn't supported"),
        ("/api/generate", {"prompt": "a", "options": {"temperature": -1}}, "temperature"),
        ("/api/generate", {"prompt": "a", "raw": True, "keep_alive": "soon"}, "keep_alive"),
        ("/api/generate", {"keep_alive": "soon"}, "keep_alive"),
        ("/api/chat", {"format": "xml", **HELLO}, "format"),
        ("/api/embed", {"input": [""]}, "text is empty"),
        ("/api/create", {"model": "a"}, "can't create models"),
        ("/api/push", {"name": "a"}, "can't push models"),
        ("/api/blobs/sha256:0a", {}, "can't take files of models"),
        ("/api/copy", {"source": "tiny", "destination": "TINY:latest"}, "'TINY:latest' can't be another name"),
        ("/api/nothing", {}, "there is no endpoint"),
    ],
)
def test_errors(client, path, fields, problem):
    response = client.post(path, json=fields)
    assert response.status_code in (400, 404) and set(response.json()) == {"error"}
    assert problem in response.json()["error"]


def test_an_error_in_a_stream_is_its_last_line(client, monkeypatch):
    def fail(*_args):
        raise ZeroDivisionError

    monkeypatch.setattr("mlxlm.server.endpoints.ollama._Answer.finish", fail)
    *_, last = lines(client.post("/api/chat", json={**HELLO, **GREEDY}))
    assert set(last) == {"error"} and "ZeroDivisionError" in last["error"]


def test_models(unloaded):
    client = unloaded
    assert client.get("/api/version").json()["version"] == VERSION
    assert client.head("/").status_code == client.head("/api/version").status_code == 200
    [model] = client.get("/api/tags").json()["models"]
    assert model["name"] == model["model"] == "tiny:latest"
    assert set(model) == {"name", "model", "modified_at", "size", "digest", "details"}


def test_the_root(client):
    def get(port, accept="*/*"):
        return client.get(f"http://localhost:{port}/", headers={"accept": accept}).text

    assert get(11434) == get(11434, "application/json") == "Ollama is running"
    assert get(8080) == get(11434, "text/html,*/*") != "Ollama is running"


def test_show(unloaded, model_folder):
    client = unloaded
    shown = client.post("/api/show", json={"name": "tiny:latest"}).json()
    assert shown["capabilities"] == ["completion", "tools"] and "m.role" in shown["template"]
    family = shown["model_info"]["general.architecture"]
    assert shown["model_info"][f"{family}.context_length"] == CONTEXT
    assert shown["details"]["family"] == family and shown["details"]["format"] == "safetensors"
    [listed] = client.get("/api/tags").json()["models"]
    assert listed["size"] == (model_folder / "model.safetensors").stat().st_size
    assert client.get("/api/ps").json() == {"models": []}  # showing it doesn't load it
    assert client.post("/api/show", json={"model": "nothing"}).status_code == 404


def test_a_copy_is_another_name(unloaded):
    client = unloaded
    assert client.post("/api/copy", json={"source": "tiny", "destination": "gpt-4o"}).status_code == 200
    assert "gpt-4o:latest" in [model["name"] for model in client.get("/api/tags").json()["models"]]
    answer = client.post("/api/chat", json={"model": "gpt-4o:latest", **HELLO, **GREEDY, "stream": False}).json()
    assert answer["model"] == "gpt-4o:latest" and answer["message"]["content"]
    assert client.request("DELETE", "/api/delete", json={"model": "gpt-4o"}).status_code == 200
    assert client.post("/api/show", json={"model": "gpt-4o"}).status_code == 404


def test_only_downloads_are_deleted(unloaded, model_folder):
    def delete(**fields):
        response = unloaded.request("DELETE", "/api/delete", json=fields)
        return response.status_code, response.json()["error"]

    assert delete(name="tiny") == (403, "tiny wasn't downloaded by mlxlm (try: remove its files yourself)")
    assert delete(model="other")[0] == 404
    assert delete() == (400, "the model is missing")  # not the default model
    assert (model_folder / "model.safetensors").exists()


def test_a_deleted_model_is_unloaded_and_removed(model_folder, tmp_path, monkeypatch):
    downloaded = LocalModel("tiny", shutil.copytree(model_folder, tmp_path / "tiny"), 0, HUB, "tiny")
    monkeypatch.setattr("mlxlm.server.endpoints.ollama_models.find_removable", lambda name: downloaded)
    models = Models({"tiny": str(downloaded.path)}, ModelSettings(aliases=["*=tiny"]))
    models.library._models["tiny"] = downloaded
    with TestClient(make_app(models)) as client:
        assert client.post("/api/generate", json={"model": "any"}).status_code == 200 and models.loaded
        assert client.request("DELETE", "/api/delete", json={"name": "any"}).status_code == 404
        assert client.request("DELETE", "/api/delete", json={"name": "tiny"}).status_code == 200
        assert not downloaded.path.exists() and not models.loaded and model_folder.exists()


def test_pull(client, models, monkeypatch):
    refused = client.post("/api/pull", json={"model": "org/name"})
    assert refused.status_code == 403 and "command line" in refused.json()["error"]

    async def pulled(source):
        yield 5, 10
        if source == "broken":
            raise OSError("the connection broke")
        yield 10, 10

    monkeypatch.setattr(models.downloads, "download", pulled)
    first, *_, last = lines(client.post("/api/pull", json={"name": "org/name"}))
    assert first == {"status": "pulling org/name", "digest": "org/name", "total": 10, "completed": 5}
    assert last == {"status": "success"} == client.post("/api/pull", json={"model": "a", "stream": False}).json()
    assert "error" in lines(client.post("/api/pull", json={"model": "broken"}))[-1]
