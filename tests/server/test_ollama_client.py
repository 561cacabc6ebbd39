"""ollama's Python client, unchanged."""

from __future__ import annotations

import json

import pytest

from tests.server.test_tools import PARAMETERS, check_arguments

ollama = pytest.importorskip("ollama", reason="the ollama client is not installed")

HELLO = [{"role": "user", "content": "Hello!"}]
OPTIONS = {"num_predict": 8, "temperature": 0, "num_ctx": 4096, "repeat_penalty": 1.0}


@pytest.fixture
def api(live):
    with ollama.Client(host=live) as client:
        yield client


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    return a + b


def test_texts(api):
    answer = api.chat("tiny", messages=HELLO, options=OPTIONS, keep_alive="10m", think=False)
    assert answer.done_reason == "length" and answer.eval_count == 8 and answer.message.content
    parts = list(api.chat("tiny", messages=HELLO, options=OPTIONS, stream=True))
    assert "".join(part.message.content for part in parts) == answer.message.content and parts[-1].done
    assert api.generate("tiny", "Hello!", options=OPTIONS).response == answer.message.content
    text = api.chat("tiny", messages=HELLO, format=PARAMETERS, options={"num_predict": 400}).message.content
    check_arguments(json.loads(text))
    entries = api.generate("tiny", "a", raw=True, logprobs=True, top_logprobs=2, options=OPTIONS).logprobs
    assert len(entries) == 8 and len(entries[0].top_logprobs) == 2


def test_tools(api):
    calls = [{"function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]
    messages = [
        *HELLO,
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_name": "add", "content": "3"},
    ]
    assert api.chat("tiny", messages=messages, tools=[add], options=OPTIONS).message.content


def test_models_and_embeddings(api):
    assert api.show("tiny").capabilities == ["completion", "tools"]
    assert [model.model for model in api.ps().models] == ["tiny:latest"]
    assert api.copy("tiny", "second").status == "success" == api.delete("second").status
    first, second = api.embed("tiny", ["one", "two"]).embeddings
    assert first == api.embeddings("tiny", "one").embedding != second


def test_errors(api):
    with pytest.raises(ollama.ResponseError, match="model 'nothing' not found") as caught:
        list(api.chat("nothing", messages=HELLO, stream=True))
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="can't fill in the middle"):
        api.generate("tiny", "a", suffix="b")
