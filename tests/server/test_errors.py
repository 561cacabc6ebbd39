"""Every answer to a bad request is an error object with a status of its own."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from mlxlm.cache import KVOptions
from mlxlm.chat.chat_template import ChatTemplate
from mlxlm.generation.kv_memory import KVMemory, StepMemory
from mlxlm.server import request_body
from mlxlm.server.app import make_app
from mlxlm.server.errors import to_api_error
from mlxlm.server.models import Models, ModelSettings, ServedModel
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import GenerationError
from tests.server.conftest import CONTEXT, HELLO

VALID = {
    "/v1/chat/completions": {**HELLO, "max_tokens": 1},
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {**HELLO, "max_tokens": 1},
    "/v1/messages/count_tokens": HELLO,
    "/v1/embeddings": {"input": "a"},
    "/tokenize": HELLO,
    "/apply-template": HELLO,
    "/detokenize": {"tokens": [8, 9]},
    "/completion": {"prompt": "a", "max_tokens": 1},
    "/infill": {"prompt": "a", "n_predict": 1},
    "/models/load": {"model": "tiny"},
    "/models/unload": {"model": "tiny"},
    "/api/chat": {**HELLO, "options": {"num_predict": 1}},
    "/api/generate": {"prompt": "a", "options": {"num_predict": 1}},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/api/show": {"model": "tiny"},
    "/api/pull": {"model": "tiny"},
    "/api/copy": {"source": "tiny", "destination": "another"},
    "/api/create": {"model": "tiny"},
    "/api/push": {"model": "tiny"},
    "/api/blobs/{digest}": {},
    "/api/v0/chat/completions": {**HELLO, "max_tokens": 1},
    "/api/v0/completions": {"prompt": "a", "max_tokens": 1},
    "/api/v0/embeddings": {"input": "a"},
    "/api/v1/models/load": {"model": "tiny"},
    "/api/v1/models/unload": {"model": "tiny"},
}
POSTS = list(VALID)
OTHERS = {"/api/embed", "/api/embeddings", "/infill"}  # they read the beginning of a long text; the model can't do it
MALFORMED = {
    "empty": b"",
    "cut": b"{",
    "list": b"[]",
    "null": b"null",
    "twice": b'{"prompt": "a", "prompt": "b"}',
    "nan": b'{"prompt": "a", "n": NaN}',
    "infinite": b'{"prompt": "a", "metadata": {"a": 1e999}}',
    "bytes": b"\xff",
    "surrogates": b'{"prompt": "\\ud800"}',
    "brackets": b"[" * 100_000,
    "deep": b'{"prompt": "a", "n": ' + b"[" * 70 + b"]" * 70 + b"}",
}


def check_error(response, status):
    assert response.status_code == status, response.text
    body = response.json()
    assert (id := response.headers["x-request-id"])
    if "/messages" in response.url.path:  # Anthropic's form
        assert set(body) == {"type", "error", "request_id"} and body["request_id"] == id
        assert set(body["error"]) == {"type", "message"}
    elif re.match("/api/(?!v[01]/)", response.url.path):  # ollama's form
        assert set(body) == {"error"}
        return {"message": body["error"]}
    else:
        assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


def test_every_endpoint_is_in_these_tests(client):
    paths = {route.path for route in client.app.routes if "POST" in route.methods}
    with_json = {path.removeprefix("/v1") for path in paths} - {"/extract-text"}
    assert {path.removeprefix("/v1") for path in VALID} == with_json
    paths = {path for path in paths if not path.startswith("/api/")}
    assert {path for path in paths if path.startswith("/v1")} == {f"/v1{path}" for path in paths if path[:3] != "/v1"}


def test_unknown_endpoint_and_method(client):
    assert "/v1/nothing" in check_error(client.get("/v1/nothing"), 404)["message"]
    response = client.get("/v1/chat/completions")
    check_error(response, 405)
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("path", "content"), [*((path, "surrogates") for path in POSTS), *(("/tokenize", name) for name in MALFORMED)]
)
def test_malformed_json(client, path, content):
    check_error(client.post(path, content=MALFORMED[content]), 400)


def test_large_body(client, monkeypatch):
    monkeypatch.setattr(request_body, "MAX_BODY_BYTES", 1000)
    check_error(client.post("/tokenize", json={"prompt": "x" * 2000}), 413)

    def parts():
        for _ in range(100):
            yield b"x" * 100

    check_error(client.post("/tokenize", content=parts()), 413)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "prompt", [20] * CONTEXT),
        ("/v1/completions", "prompt", ["a", [20] * (CONTEXT + 5)]),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": "fox " * CONTEXT}]),
        ("/v1/responses", "input", "fox " * CONTEXT),
        ("/v1/messages", "messages", [{"role": "user", "content": "fox " * CONTEXT}]),
    ],
)
def test_a_prompt_longer_than_the_context(client, path, field, value, stream):
    error = check_error(client.post(path, json={**VALID[path], field: value, "stream": stream}), 400)
    assert "prompt is too long" in error["message"] and f"maximum context length is {CONTEXT}" in error["message"]
    assert error.get("code") == (None if path == "/v1/messages" else "context_length_exceeded")


WITH_TEXT = {"messages", "prompt", "input"}


@pytest.mark.parametrize("path", [path for path in POSTS if WITH_TEXT & set(VALID[path]) and path not in OTHERS])
def test_only_the_beginning_of_a_huge_prompt_is_encoded(client, path, monkeypatch):
    monkeypatch.setattr("mlxlm.server.models.MAX_COUNTED", CONTEXT)
    sizes, original = [], Tokenizer._encode

    def encode(tokenizer, texts, *args, **options):
        sizes.extend(map(len, texts))
        return original(tokenizer, texts, *args, **options)

    monkeypatch.setattr(Tokenizer, "_encode", encode)
    for text in ("fox " * 10**6, "<|end|>" * 10**5):
        body = {**VALID[path], "messages": [{"role": "user", "content": text}], "prompt": text, "input": text}
        error = check_error(client.post(path, json={key: body[key] for key in VALID[path]}), 400)
        assert "prompt is too long: more than" in error["message"]
        assert f"maximum context length is {CONTEXT}" in error["message"]
    assert sum(sizes) < 40 * CONTEXT and len(sizes) < 20


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("stop", ["a"] * 100_000, "at most 64 items"),
        ("dry_sequence_breakers", ["a"] * 100_000, "at most 64 items"),
        ("choice", ["a"] * 100_000, "at most 1024 items"),
        ("logit_bias", {str(n): 1 for n in range(100_000)}, "at most 1024 items"),
        ("json_schema", {"const": "a" * (1 << 18)}, "more than 262144 characters"),
        ("regex", "a" * (1 << 18) + "a", "at most 262144 characters"),
    ],
)
@pytest.mark.parametrize("path", POSTS[:4])
def test_large_options_are_refused_with_their_limit(client, path, field, value, limit):
    if field == "stop":
        field = {"/v1/messages": "stop_sequences", "/v1/responses": "dry_sequence_breakers"}.get(path, field)
    assert limit in check_error(client.post(path, json={**VALID[path], field: value}), 400)["message"]


def test_errors_dont_repeat_huge_values(client):
    error = client.post("/v1/completions", json={"prompt": "a", "temperature": "x" * 100_000, "y" * 100_000: 1})
    assert len(error.text) < 5000


@pytest.mark.parametrize("error", [RuntimeError("[malloc] Unable to allocate 9 bytes."), MemoryError()], ids=repr)
def test_memory_that_cannot_be_allocated_is_a_503(error):
    found = to_api_error(error)
    assert found.status == 503 and found.headers["retry-after"] and found.message.startswith("out of memory")


def test_hints_are_for_clients():
    full = GenerationError("there is no memory", "`key_bits=8`", is_operator_hint=True)
    assert to_api_error(full).message == "there is no memory"
    assert to_api_error(full.prefixed("prompt 2")).message == "prompt 2: there is no memory"
    assert to_api_error(GenerationError("the prompt is empty", "some text")).message.endswith("(try: some text)")


def test_a_prompt_that_never_fits_is_a_400_and_one_that_may_fit_later_a_503(lm, monkeypatch):
    monkeypatch.setattr("mlxlm.cache.kv_cache.STEP", 8)  # the caches of this short context
    monkeypatch.setattr("mlxlm.generation.kv_memory._HEADROOM", 8)
    kv_bytes, large = KVMemory(lm, KVOptions(), 0).reserved_bytes(96), 1 << 30
    model = ServedModel("tiny", lm, ModelSettings(batch_size=1))
    sizes = range(kv_bytes, large, 100)
    small = next(n for n in sizes if StepMemory.divide(lm, n, 1, 512).kv_bytes >= kv_bytes)
    template = "{{ messages[0].content }}{% if messages[0].content == 'no' %}{{ raise_exception('why') }}{% endif %}"
    model.encoder = ChatTemplate(lm.tokenizer, template)
    models = Models({"tiny": "unused"}, model.settings)
    models.add(model)
    with TestClient(make_app(models)) as client:
        model.engine.limit_memory(small)
        error = check_error(client.post("/v1/completions", json={"prompt": [7] * 101}), 400)
        assert error["code"] == "context_length_exceeded" and "memory has room for 95" in error["message"]
        assert "fewer tokens, a larger `max_memory`, or `key_bits=8`)" in error["message"]
        grown = client.post("/v1/completions", json={"prompt": [7] * 80, "max_tokens": 99}).json()
        assert grown["usage"]["completion_tokens"] == 16 and grown["choices"][0]["finish_reason"] == "length"
        model.engine.limit_memory(small, large)
        later = client.post("/v1/completions", json={"prompt": [7] * 101})
        assert "while other models are loaded" in check_error(later, 503)["message"] and later.headers["retry-after"]
        refused = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "no"}]})
        assert check_error(refused, 400)["message"].endswith("why")


def test_internal_errors_have_the_form_and_no_details(client, models, monkeypatch):
    def fail(*_args, **_options):
        raise ZeroDivisionError("/secret/path")

    monkeypatch.setattr("mlxlm.server.endpoints.completions.sample_requests", fail)
    response = client.post("/v1/completions", json={"prompt": "a"})
    assert response.headers["x-request-id"] in check_error(response, 500)["message"]
    assert "secret" not in response.text
