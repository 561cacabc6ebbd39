"""POST /v1/completions, /tokenize and /detokenize."""

from __future__ import annotations

import pytest

from mlxlm.generation import score
from tests.server.apis import events
from tests.server.conftest import CONTEXT


@pytest.fixture
def complete(client):
    def ask(**fields):
        response = client.post("/v1/completions", json={"prompt": "The quick", "temperature": 0, **fields})
        return events(response.text) if fields.get("stream") and response.status_code == 200 else response.json()

    return ask


def joined(chunks, index):
    choices = [choice for chunk in chunks[:-1] for choice in chunk["choices"]]
    return "".join(choice["text"] for choice in choices if choice["index"] == index)


def test_response_has_openais_form(complete):
    answer = complete()
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion"
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["choices"][0]["finish_reason"] == "length" and answer["choices"][0]["text"]


def test_several_prompts_and_samples_stream_as_they_are(complete):
    fields = {"prompt": ["The", "How"], "n": 2, "temperature": 1.2, "seed": 4, "echo": True}
    whole, chunks = complete(**fields), complete(stream=True, **fields)
    texts = [choice["text"] for choice in whole["choices"]]
    assert [joined(chunks, n) for n in range(4)] == texts
    assert len(set(texts)) == 4
    assert [text[:3] for text in texts] == ["The", "The", "How", "How"]


def test_token_ids(client, complete):
    ids = client.post("/tokenize", json={"prompt": "The quick"}).json()["tokens"]
    assert complete(prompt=ids)["choices"][0]["text"] == complete()["choices"][0]["text"]
    assert len(complete(prompt=[ids, ids])["choices"]) == 2
    assert complete(prompt=ids, echo=True)["choices"][0]["text"].startswith("The quick")


def test_logprobs(complete):
    answer = complete(logprobs=3, max_tokens=5)
    found = answer["choices"][0]["logprobs"]
    assert "".join(found["tokens"]) == answer["choices"][0]["text"]
    assert found["text_offset"][0] == 0 and found["text_offset"][1] == len(found["tokens"][0])
    assert all(len(top) <= 3 for top in found["top_logprobs"]) and all(value <= 0 for value in found["token_logprobs"])
    prompts = ["The quick", "How are"]
    both = complete(prompt=prompts, logprobs=3, max_tokens=5)["choices"]
    chunks = complete(prompt=prompts, logprobs=3, max_tokens=5, stream=True)[:-1]
    streamed = [choice for chunk in chunks for choice in chunk["choices"]]
    for choice in both:
        parts = [part["logprobs"] for part in streamed if part["index"] == choice["index"] and part["logprobs"]]
        for name in ("tokens", "text_offset"):
            assert [value for part in parts for value in part[name]] == choice["logprobs"][name]


def test_logprobs_of_the_prompt(complete, lm):
    text = "The quick brown fox"
    alone = complete(prompt=text, echo=True, logprobs=2, max_tokens=0)
    choice = alone["choices"][0]
    assert choice["text"] == text and choice["finish_reason"] == "length"
    found = choice["logprobs"]
    assert alone["usage"]["prompt_tokens"] == alone["usage"]["total_tokens"] == len(found["tokens"])
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    expected = score(lm, text).logprobs
    assert found["token_logprobs"][-len(expected) :] == pytest.approx(expected, abs=1e-4)
    assert "".join(found["tokens"][-len(expected) :]) == text and found["text_offset"][-1] == len(text) - len(
        found["tokens"][-1]
    )
    more = complete(prompt=text, echo=True, logprobs=2, max_tokens=3)["choices"][0]
    assert more["logprobs"]["tokens"][:-3] == found["tokens"] and more["text"].startswith(text)
    chunks = complete(prompt=text, echo=True, logprobs=2, max_tokens=3, stream=True)
    parts = [c["choices"][0]["logprobs"] for c in chunks[:-1] if c["choices"][0]["logprobs"]]
    for name in ("tokens", "text_offset", "token_logprobs"):
        assert [value for part in parts for value in part[name]] == more["logprobs"][name]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt.0"),
        ({"prompt": [[]]}, None),
        ({"prompt": [10**30]}, None),
        ({"prompt": [-1]}, None),
        ({"suffix": "end"}, "suffix"),
        ({"suffix": "end", "prompt": [1]}, "prompt"),
        ({"best_of": 3}, "best_of"),
        ({"logprobs": 100}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "echo": True, "stream": True}, "max_tokens"),
        ({"conversation": "a"}, "conversation"),
    ],
)
def test_invalid_fields(complete, fields, param):
    error = complete(**fields)["error"]
    assert error["type"] == "invalid_request_error" and (param is None or error["param"] == param)


def test_tokenize_round_trip(client):
    text = "Grüße, 世界! <|end|>"
    ids = client.post("/v1/tokenize", json={"prompt": text, "add_special_tokens": False}).json()
    assert ids["count"] == len(ids["tokens"]) and ids["max_model_len"] == CONTEXT
    assert client.post("/detokenize", json={"tokens": ids["tokens"]}).json()["prompt"] == text


def test_detokenize_refuses_unknown_ids(client):
    response = client.post("/detokenize", json={"tokens": [1, 99999]})
    assert response.status_code == 400 and response.json()["error"]["param"] == "tokens.1"


def test_tokenize_needs_one_input(client):
    assert client.post("/tokenize", json={}).status_code == 400
