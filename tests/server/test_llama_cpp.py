"""llama.cpp's endpoints, with the requests of llama.vim, llama.vscode and Continue; suffix in completions."""

from __future__ import annotations

import pytest
from starlette.testclient import TestClient

from mlxlm import tokenizer
from mlxlm.generation import LoadedModel, Request
from mlxlm.server.app import make_app
from mlxlm.server.models import ModelSettings, ServedModel
from mlxlm.tokenizer import FillInTheMiddle
from tests.server.apis import events
from tests.server.conftest import CONTEXT, TEXT, OpenModels
from tests.tokenizer.test_fill_in_the_middle import QWEN, with_tokens

VIM = {
    "input_prefix": "The quick\n",
    "input_suffix": " fox\njumps\n",
    "input_extra": [{"text": "the lazy dog", "time": 12.5, "filename": "dog.txt"}],
    "prompt": "brown",
    "n_predict": 8,
    "n_indent": 0,
    "top_k": 40,
    "top_p": 0.99,
    "stream": False,
    "samplers": ["top_k", "top_p", "infill"],
    "cache_prompt": True,
    "t_max_prompt_ms": 500,
    "t_max_predict_ms": 1000,
    "response_fields": ["content", "timings/prompt_n", "timings/predicted_n", "truncated", "tokens_cached", "nothing"],
}
GREEDY = {"temperature": 0, "n_predict": 8}


@pytest.fixture(scope="module")
def code_lm(decoder, tmp_path_factory):
    """The tiny model with the tokens for fill-in-the-middle."""
    tokens = with_tokens(tokenizer.train(TEXT, 290), [*QWEN, "<|file_sep|>"])
    return LoadedModel(decoder, tokens, decoder.config, tmp_path_factory.getbasetemp())


@pytest.fixture(scope="module")
def code_model(code_lm):
    model = ServedModel("code", code_lm, ModelSettings())
    yield model
    model.engine.close()


@pytest.fixture
def code(code_model):
    models = OpenModels({"code": "unused"}, code_model.settings)
    models.add(code_model)
    with TestClient(make_app(models)) as client:
        yield client


@pytest.fixture
def complete(client):
    return lambda **fields: client.post("/completion", json={"prompt": "The quick", **GREEDY, **fields}).json()


def test_completion(complete, client):
    answer = complete()
    expected = client.post("/v1/completions", json={"prompt": "The quick", "temperature": 0, "max_tokens": 8}).json()
    assert answer["content"] == expected["choices"][0]["text"]
    assert answer["stop"] is True and answer["stop_type"] == "limit" and answer["truncated"] is False
    assert answer["tokens_predicted"] == answer["timings"]["predicted_n"] == 8 and answer["tokens"] == []
    assert answer["tokens_evaluated"] == expected["usage"]["prompt_tokens"]
    assert answer["generation_settings"]["n_ctx"] == CONTEXT and answer["generation_settings"]["temperature"] == 0
    assert len(complete(return_tokens=True)["tokens"]) == 8
    stop = answer["content"][-1]
    assert complete(stop=[stop])["stop_type"] == "word"


def test_streamed_completion(complete, client):
    body = {"prompt": "The quick", **GREEDY, "stream": True, "mirostat": 0, "frequency_penalty": 0}  # Continue's
    response = client.post("/completion", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *parts, last = events(response.text)
    assert not any(part["stop"] for part in parts) and last["stop"] is True and last["content"] == ""
    assert "".join(part["content"] for part in parts) == complete()["content"]


def test_probabilities(complete, client):
    whole = complete(n_probs=2)
    entries = whole["completion_probabilities"]
    content = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert content.decode("utf-8", "replace") == whole["content"] and len(entries) == 8
    for entry in entries:  # greedy
        assert set(entry) == {"id", "token", "bytes", "logprob", "top_logprobs"}
        assert entry["top_logprobs"][0] == {key: entry[key] for key in ("id", "token", "bytes", "logprob")}
        assert len(entry["top_logprobs"]) == 2
    body = {"prompt": "The quick", **GREEDY, "n_probs": 2, "stream": True}
    *parts, last = events(client.post("/completion", json=body).text)
    assert [entry for part in parts for entry in part["completion_probabilities"]] == entries
    assert "completion_probabilities" not in {**last, **complete()}


def test_prompts_can_have_special_tokens_or_be_ids(complete, lm):
    answer = complete(prompt="<|end|>The quick")
    ids = lm.tokenizer.encode("<|end|>The quick", parse_special=True)
    assert answer["tokens_evaluated"] == len(ids) and complete(prompt=ids)["content"] == answer["content"]


def test_infill(code, code_lm):
    answer = code.post("/infill", json=VIM).json()
    assert set(answer) == {"content", "timings/prompt_n", "timings/predicted_n", "truncated", "tokens_cached"}
    files = [("dog.txt", "the lazy dog")]
    prompt = FillInTheMiddle(code_lm.tokenizer).encode("The quick\n", " fox\njumps\n", "brown", files)
    fields = {name: VIM[name] for name in ("input_prefix", "input_suffix", "input_extra", "prompt")}
    whole = code.post("/infill", json={**fields, **GREEDY}).json()
    assert whole["tokens_evaluated"] == len(prompt)
    assert whole["content"] == code.post("/completion", json={"prompt": prompt, **GREEDY}).json()["content"]


def test_a_request_that_only_fills_the_cache(code):
    warm = {**VIM, "input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "samplers": []}
    assert code.post("/infill", json={**warm, "response_fields": [""]}).json() == {}
    answer = code.post("/infill", json={key: value for key, value in warm.items() if key != "response_fields"}).json()
    assert answer["content"] == "" and answer["tokens_predicted"] == 0


def test_a_time_limit_ends_the_text_after_a_line(complete, lm):
    fields = {"n_predict": 1000, "t_max_predict_ms": 1}
    [line_break], [letter] = (lm.tokenizer.encode(text, continues=True) for text in ("\n", "a"))
    answer = complete(logit_bias={str(line_break): 1000}, **fields)
    assert 0 < answer["tokens_predicted"] < 1000 and answer["stop_type"] == "limit" and answer["content"]
    assert complete(logit_bias={str(letter): 1000}, **{**fields, "n_predict": 50})["tokens_predicted"] == 50


def test_suffix(code, code_lm):
    body = {"prompt": "The quick", "suffix": " fox", "temperature": 0, "max_tokens": 8}
    answer = code.post("/v1/completions", json=body).json()
    prompt = FillInTheMiddle(code_lm.tokenizer).encode("The quick", " fox")
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    expected = code.post("/completion", json={"prompt": prompt, **GREEDY}).json()["content"]
    assert answer["choices"][0]["text"] == expected
    fields = {"prompt": "The quick", "suffix": " fox", "options": {"temperature": 0, "num_predict": 8}}
    assert code.post("/api/generate", json={**fields, "stream": False}).json()["response"] == expected
    assert code.post("/v1/completions", json={**body, "prompt": prompt}).json()["error"]["param"] == "prompt"
    assert code.post("/v1/completions", json={**body, "suffix": ""}).json()["usage"]["prompt_tokens"] < len(prompt)


def test_tokens_of_fill_in_the_middle_end_the_text(code, code_lm, monkeypatch):
    seen: list[Request] = []
    [model] = code.app.state.models.loaded
    original = model.engine.submit
    monkeypatch.setattr(model.engine, "submit", lambda request: seen.append(request) or original(request))
    code.post("/infill", json={**VIM, "n_predict": 1})
    assert FillInTheMiddle(code_lm.tokenizer).end_token_ids <= seen[0].eos_token_ids


@pytest.mark.parametrize(("path", "fields"), [("/infill", VIM), ("/v1/completions", {"prompt": "a", "suffix": "b"})])
def test_models_without_the_tokens(client, path, fields):
    response = client.post(path, json=fields)
    assert response.status_code == 400 and "can't fill in the middle" in response.json()["error"]["message"]


def test_props_and_slots(client, models):
    props = client.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == CONTEXT and "m.role" in props["chat_template"]
    assert props["total_slots"] == models.settings.batch_size == len(slots := client.get("/slots").json())
    assert slots[0] == {"id": 0, "n_ctx": CONTEXT, "is_processing": False}
    assert client.get("/props?model=nothing").status_code == 404


def test_apply_template(client, lm):
    body = {"messages": [{"role": "user", "content": "Hello <|end|>"}]}
    prompt = client.post("/apply-template", json=body).json()["prompt"]
    assert prompt.startswith("<") and "Hello <|end|>" in prompt
    ids = client.post("/tokenize", json=body).json()["tokens"]
    assert lm.tokenizer.decode(ids, skip_special_tokens=False) == prompt
    assert client.post("/apply-template", json={"prompt": "a"}).json()["error"]["param"] == "messages"


def test_tokens(client, lm):
    text = "The quick <|end|>"
    plain = client.post("/tokenize", json={"content": text, "parse_special": False}).json()["tokens"]
    assert plain == lm.tokenizer.encode(text, add_special_tokens=False)
    parsed = client.post("/tokenize", json={"content": text}).json()["tokens"]
    assert parsed == lm.tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    special = client.post("/tokenize", json={"content": text, "add_special": True}).json()["tokens"]
    assert special == lm.tokenizer.encode(text, parse_special=True)
    pieces = client.post("/tokenize", json={"content": "The 世", "with_pieces": True}).json()["tokens"]
    spelled = [bytes(p["piece"]) if isinstance(p["piece"], list) else p["piece"].encode() for p in pieces]
    assert b"".join(spelled).decode() == "The 世" and pieces[0]["id"] == plain[0]
    assert client.post("/detokenize", json={"tokens": parsed}).json()["content"] == text
