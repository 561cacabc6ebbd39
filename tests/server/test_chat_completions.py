"""POST /v1/chat/completions."""

from __future__ import annotations

import json

import pytest

from mlxlm.generation import GenerationOptions
from mlxlm.server.text import sample_requests
from tests.server.conftest import HELLO


def text_of(deltas, name="content", index=0):
    choices = [choice for event in deltas if event != "[DONE]" for choice in event["choices"]]
    return "".join(choice["delta"].get(name) or "" for choice in choices if choice["index"] == index)


def test_response_has_openais_form(chat):
    answer = chat()
    assert answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion" and answer["model"] == "tiny"
    [choice] = answer["choices"]
    assert choice["index"] == 0 and choice["finish_reason"] == "length" and choice["logprobs"] is None
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"]
    usage = answer["usage"]
    assert usage["completion_tokens"] == 20 and usage["prompt_tokens"] > 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 20
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0
    timings = answer["timings"]
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"] and timings["predicted_n"] == 20
    assert timings["predicted_ms"] * timings["predicted_per_second"] == pytest.approx(19 * 1000)
    assert min(timings["prompt_ms"], timings["prompt_per_second"], timings["predicted_ms"]) > 0
    assert chat(max_tokens=1)["timings"]["predicted_per_second"] is None and "timings" not in chat(n=2)


def test_stream_has_openais_form(chat):
    *chunks, done = chat(stream=True, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert chunks[0]["object"] == "chat.completion.chunk"
    first, *others, last, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in c["choices"][0]["delta"] and c["choices"][0]["finish_reason"] is None for c in others)
    assert last["choices"][0]["delta"] == {} and last["choices"][0]["finish_reason"] == "length"
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == usage["timings"]["predicted_n"] == 20
    assert all(c["usage"] is None for c in chunks[:-1])
    assert not any("usage" in chunk for chunk in chat(stream=True)[:-1])


def test_samples_differ_and_depend_on_the_seed(chat):
    fields = {"n": 3, "temperature": 1.5, "seed": 7}
    texts = [choice["message"]["content"] for choice in chat(**fields)["choices"]]
    assert len(set(texts)) == 3
    assert [choice["message"]["content"] for choice in chat(**fields)["choices"]] == texts
    streamed = chat(stream=True, **fields)
    assert [text_of(streamed, index=n) for n in range(3)] == texts
    assert len({chat(temperature=1.5)["choices"][0]["message"]["content"] for _ in range(3)}) > 1  # without a seed
    usage, alone = chat(**fields)["usage"], chat()["usage"]
    assert usage["completion_tokens"] == 60 and usage["prompt_tokens"] == alone["prompt_tokens"]  # of all samples
    assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]


@pytest.mark.parametrize(("options", "n", "wanted"), [({}, 1, False), ({"seed": 7}, 1, True), ({"seed": 7}, 2, False)])
def test_a_single_text_with_a_seed_is_deterministic(options, n, wanted):
    requests = sample_requests([[5]], GenerationOptions(**options), frozenset(), n)
    assert {request.options.is_deterministic for request in requests} == {wanted}


def test_json_object_and_schema(chat):
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    assert json.loads(chat(response_format=form)["choices"][0]["message"]["content"])["a"] in ("x", "y")
    [*_, last, _done] = chat(response_format=form, stream=True)
    assert last["choices"][0]["finish_reason"] == "stop"
    text = chat(response_format={"type": "json_object"}, max_tokens=1)["choices"][0]["message"]["content"]
    assert text == "{"


def test_unsupported_schema_is_refused(chat):
    schema = {"type": "object", "properties": {"a": {"type": "string", "format": "made-up"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    for stream in (False, True):
        error = chat(response_format=form, stream=stream)["error"]
        assert error["type"] == "invalid_request_error" and "format" in error["message"]


def test_own_options(chat):
    assert chat(choice=["yes", "no"])["choices"][0]["message"]["content"] in ("yes", "no")
    assert chat(regex="[0-9]{3}")["choices"][0]["message"]["content"].isdecimal()
    whole = chat(temperature=1.5, seed=1)["choices"][0]["message"]["content"]
    greedy = chat(temperature=1.5, seed=1, top_k=1)["choices"][0]["message"]["content"]
    assert greedy == chat()["choices"][0]["message"]["content"] != whole


def test_logit_bias_and_penalties_change_the_text(chat):
    plain = chat()["choices"][0]["message"]["content"]
    biased = chat(logit_bias={"50": 1000}, logprobs=True)["choices"][0]
    assert len({entry["token"] for entry in biased["logprobs"]["content"]}) == 1
    assert chat(frequency_penalty=50)["choices"][0]["message"]["content"] != plain


def test_messages_of_parts_and_prefill(client, chat):
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]

    def tokens(messages):
        return client.post("/tokenize", json={"messages": messages}).json()["tokens"]

    assert tokens([{"role": "user", "content": parts}]) == tokens([{"role": "user", "content": "Hel\nlo"}])
    question, begun = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well"}
    assert tokens([question, begun])[: len(tokens([question]))] == tokens([question])
    assert chat(messages=[question, begun])["choices"][0]["message"]["content"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [*HELLO["messages"], {"role": "nobody", "content": "x"}]}, "messages.1.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": ["hi"]}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0"),
        ({"messages": [{"role": "tool", "tool_call_id": "call_1"}]}, "messages.0"),
        ({"messages": None}, "messages"),
        ({"messages": ["hi"]}, "messages.0"),
        ({"messages": [{"content": "hi"}]}, "messages.0.role"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 1e999}, None),
        ({"top_p": -1}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"stop": [5]}, "stop.0"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"seed": -2}, "seed"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"modalities": ["audio"]}, "modalities.0"),
    ],
)
def test_invalid_fields_are_named(client, fields, param):
    content = json.dumps({**HELLO, **fields})
    response = client.post("/v1/chat/completions", content=content)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error" and error["message"]
    assert param is None or error["param"] == param


def test_second_question_uses_the_prefix_cache(chat):
    messages = [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 20}]
    answer = chat(messages=messages)["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And?"}]
    usage = chat(messages=messages)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] > usage["prompt_tokens"] / 2


def test_top_logprobs_need_no_logprobs(chat):
    [entry] = chat(top_logprobs=2, max_tokens=1)["choices"][0]["logprobs"]["content"]
    assert len(entry["top_logprobs"]) == 2
    for fields in ({"top_logprobs": 0}, {"top_logprobs": 2, "logprobs": False}):
        assert chat(**fields, max_tokens=1)["choices"][0]["logprobs"] is None


def test_the_schema_of_a_format_can_be_next_to_its_type(chat):
    schema = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}
    for form in ({"type": "json_object", "schema": schema}, {"type": "json_schema", "schema": schema}):
        assert chat(response_format=form, max_tokens=60)["choices"][0]["message"]["content"] == '{"a": "x"}'
