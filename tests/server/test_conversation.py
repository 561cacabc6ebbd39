"""Answers, split into reasoning, text and calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxlm.chat.tool_formats import JSON_FORMAT
from mlxlm.generation import GenerationChunk, GenerationOptions, Request
from mlxlm.server.conversation import reasoning_kwargs
from mlxlm.server.text import Text

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'


def parse(pieces, prefix="", tool_format=None, reason="eos"):
    """The kinds and texts of the parts of a text that comes in pieces, and the text."""
    text, added = Text(0, Request([1], GenerationOptions()), prefix, tool_format), []
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


def test_hints_for_the_template():
    assert reasoning_kwargs(None) == {}
    assert reasoning_kwargs("low", "high") == {"reasoning_effort": "low", "verbosity": "high"}
    assert reasoning_kwargs("none")["enable_thinking"] is False
