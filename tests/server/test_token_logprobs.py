"""Log-probabilities in step with the text."""

from __future__ import annotations

import math

import pytest

from mlxlm.generation.logprobs import TokenLogprob, TokenLogprobs
from mlxlm.server.text import LogprobBuffer, describe_logprobs
from tests.server.conftest import events


def push(buffer, content, text, finish_reason=None):
    entry = TokenLogprobs(9, -0.5, (), content)
    return b"".join(token.bytes for token in buffer.push(entry, text, finish_reason))


def test_tokens_come_with_their_text():
    buffer = LogprobBuffer()
    assert push(buffer, b"ab", "ab") == b"ab"
    assert push(buffer, "é".encode()[:1], "") == b""
    assert push(buffer, "é".encode()[1:], "é") == "é".encode()


def test_tokens_of_a_stop_string_are_dropped():
    buffer = LogprobBuffer()
    assert push(buffer, b"a", "a") == b"a"
    assert push(buffer, b"EN", "") == b""
    assert push(buffer, b"D", "", "stop") == b""


def test_tokens_of_what_was_no_stop_string_follow():
    buffer = LogprobBuffer()
    assert push(buffer, b"EN", "") == b""
    assert push(buffer, b"T", "ENT") == b"ENT"
    assert push(buffer, b"x", "", "length") == b"x"


def test_the_end_token_is_left_out():
    buffer = LogprobBuffer()
    assert buffer.push(TokenLogprobs(1, -0.1, (), b""), "", "eos") == []


def test_special_tokens_have_their_name_and_no_infinity(lm):
    eos = lm.tokenizer.eos_token_id
    entry = TokenLogprobs(20, -math.inf, (TokenLogprob(eos, -1.5, b""),), b"a")
    [described] = describe_logprobs([entry], lm.tokenizer)
    assert described["logprob"] == -9999.0 and described["bytes"] == [97]
    [top] = described["top_logprobs"]
    assert top["token"] == lm.tokenizer.special_token_names["eos"] and top["bytes"] == []


@pytest.mark.parametrize("stream", [False, True])
def test_those_of_a_response_add_up_to_the_text(client, stream):
    body = {"input": "Hello!", "include": ["message.output_text.logprobs"], "top_logprobs": 2, "seed": 3}
    response = client.post("/v1/responses", json={**body, "max_output_tokens": 40, "stream": stream})
    if stream:
        parts = [event for event in events(response.text) if event["type"] == "response.output_text.delta"]
        text, entries = "".join(part["delta"] for part in parts), [e for part in parts for e in part["logprobs"]]
    else:
        [part] = response.json()["output"][0]["content"]
        text, entries = part["text"], part["logprobs"]
    assert len(entries) == 40 and all(len(entry["top_logprobs"]) == 2 for entry in entries)
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode("utf-8", "replace") == text
