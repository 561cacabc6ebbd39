"""A text, split into reasoning, text and calls, with log-probabilities in step with it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxlm.chat.answer_parser import AnswerParser
from mlxlm.chat.reasoning import THINK
from mlxlm.chat.tool_calls import JSON_FORMAT
from mlxlm.generation import GenerationChunk, GenerationOptions, Request
from mlxlm.generation.result import TokenLogprob, TokenLogprobs
from mlxlm.server.endpoints.chat_completions import ChatCompletionRequest, _ChatCompletion
from mlxlm.server.endpoints.messages import _Message
from mlxlm.server.endpoints.responses import ResponseRequest, _Response
from mlxlm.server.text import LogprobBuffer, Text, describe_logprobs
from tests.server.conftest import HELLO

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'


def parse(pieces, prefix="", tool_format=None, reason="eos"):
    """The kinds and texts of the parts of a text that comes in pieces, and the text."""
    parser = AnswerParser(tool_format, None if prefix is None else THINK)
    parser.push(prefix or "")
    text, added = Text(0, Request([1], GenerationOptions()), parser), []
    for number, piece in enumerate(pieces, 1):
        added += text.push(GenerationChunk(piece, 9, reason if number == len(pieces) else None))
    assert [piece.part for piece in added if piece.is_first] == text.parts
    for part in text.parts:
        assert "".join(piece.text for piece in added if piece.part is part) == part.text
    return [[part.kind, part.text] for part in text.parts], text


@given(st.lists(st.integers(0, 90)))
def test_all_kinds_however_the_text_is_split(cuts):
    text = "<think>why</think>\n\nBecause.\n" + CALL
    bounds = [0, *sorted(cuts), len(text)]
    parts, answer = parse([text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)], "", JSON_FORMAT)
    assert parts == [["reasoning", "why"], ["text", "Because."], ["call", '{"a": "x"}']]
    assert answer.finish_reason == "tool_calls" and answer.reasoning_tokens > 0


def test_a_template_that_opens_the_block():
    assert parse(["why</think>so"], "<think>\n")[0] == [["reasoning", "why"], ["text", "so"]]


@pytest.mark.parametrize("text", ["<think>a</think>b", CALL])
def test_plain_text_is_not_split(text):
    parts, answer = parse([text], None, None)
    assert parts == [["text", text]] and answer.finish_reason == "stop"


def test_markup_that_is_cut_off_is_no_text():
    assert parse(["Well. <tool_call>\n{"], "", JSON_FORMAT, "length")[0] == [["text", "Well."]]


def test_calls_in_one_chunk_have_their_own_index():
    text = Text(0, Request([1], GenerationOptions()), AnswerParser(JSON_FORMAT, THINK))
    body = ChatCompletionRequest.model_validate(HELLO)
    reply = _ChatCompletion(SimpleNamespace(name="tiny"), [text], body, {})
    deltas = [
        event["choices"][0]["delta"] for event in reply.push(text, text.push(GenerationChunk(CALL + CALL, 9, "eos")))
    ]
    assert [call["index"] for delta in deltas for call in delta.get("tool_calls", ())] == [0, 0, 1, 1]


def test_progress_until_all_texts_have_begun():
    texts = [Text(n, Request([1, 2, 3], GenerationOptions())) for n in range(2)]
    reply = _ChatCompletion(SimpleNamespace(name="tiny"), texts, ChatCompletionRequest.model_validate(HELLO), {})
    for num_generated, expected in ((0, b": reading the prompt, 5 of 6 tokens\n\n"), (1, b": generating\n\n")):
        texts[0].stream = SimpleNamespace(num_read=2, num_generated=1)
        texts[1].stream = SimpleNamespace(num_read=2, num_generated=num_generated)
        assert reply.progress() == expected


def test_parts_begin_and_end_in_turn():
    model = SimpleNamespace(name="tiny", lm=SimpleNamespace(tokenizer=None))
    text = Text(0, Request([1], GenerationOptions()), AnswerParser(JSON_FORMAT, THINK))
    pieces = text.push(GenerationChunk(f"<think>why</think>\n\nBecause.\n{CALL}", 9, "eos"))
    found = [
        (e["type"].removeprefix("content_block_"), e["index"]) for e in _Message(model, [text], []).push(text, pieces)
    ]
    assert found == [(kind, index) for index in range(3) for kind in ("start", "delta", "stop")]
    events = list(_Response(model, [text], ResponseRequest(input="a")).push(text, pieces))
    found = [(e["type"].rpartition(".")[2], e["output_index"]) for e in events if "output_item" in e["type"]]
    assert found == [(kind, index) for index in range(3) for kind in ("added", "done")]


@pytest.mark.parametrize(
    "steps",  # tokens, the text that comes with them, and the tokens that come with it
    [
        [(b"ab", "ab", None, b"ab"), (b"\xc3", "", None, b""), (b"\xa9", "é", None, b"\xc3\xa9")],
        [(b"a", "a", None, b"a"), (b"EN", "", None, b""), (b"D", "", "stop", b"")],  # a stop string
        [(b"EN", "", None, b""), (b"T", "ENT", None, b"ENT"), (b"x", "", "length", b"x")],  # none in the end
    ],
)
def test_tokens_come_with_their_text(steps):
    buffer = LogprobBuffer()
    for content, text, reason, expected in steps:
        found = buffer.push(TokenLogprobs(9, -0.5, (), content), text, reason)
        assert b"".join(token.bytes for token in found) == expected
    assert LogprobBuffer().push(TokenLogprobs(1, -0.1, (), b""), "", "eos") == []  # the end token is left out


def test_special_tokens_have_their_name_and_no_infinity(lm):
    eos = lm.tokenizer.eos_token_id
    entry = TokenLogprobs(20, -math.inf, (TokenLogprob(eos, -1.5, b""),), b"a")
    [described] = describe_logprobs([entry], lm.tokenizer)
    assert described["logprob"] == -9999.0 and described["bytes"] == [97]
    [top] = described["top_logprobs"]
    assert top["token"] == lm.tokenizer.special_token_names["eos"] and top["bytes"] == []
