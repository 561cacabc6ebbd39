"""Answers, split into reasoning, text and calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxlm.chat.tool_calls import JSON_FORMAT
from mlxlm.generation import GenerationChunk
from mlxlm.server.conversation import AnswerParser, reasoning_kwargs

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'


def parse(pieces, prefix="", tool_format=None, reason="eos"):
    """The kinds and texts of an answer that comes in pieces, and the parser."""
    parser = AnswerParser(prefix, tool_format)
    parts = []
    for number, piece in enumerate(pieces, 1):
        for delta in parser.push(GenerationChunk(piece, 9, reason if number == len(pieces) else None)):
            if parts and parts[-1][0] == delta.kind and delta.call_id is None:
                parts[-1][1] += delta.text
            else:
                parts.append([delta.kind, delta.text])
    return parts, parser


@given(st.lists(st.integers(0, 90)))
def test_all_kinds_however_the_text_is_split(cuts):
    text = "<think>why</think>\n\nBecause.\n" + CALL
    bounds = [0, *sorted(cuts), len(text)]
    parts, parser = parse([text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)], "", JSON_FORMAT)
    assert parts == [["reasoning", "why"], ["text", "Because."], ["call", '{"a": "x"}']]
    assert parser.has_calls and parser.reasoning_tokens > 0


def test_a_template_that_opens_the_block():
    assert parse(["why</think>so"], "<think>\n")[0] == [["reasoning", "why"], ["text", "so"]]


@pytest.mark.parametrize("text", ["<think>a</think>b", CALL])
def test_plain_text_is_not_split(text):
    parts, parser = parse([text], None, None)
    assert parts == [["text", text]] and not parser.has_calls


def test_markup_that_is_cut_off_is_no_text():
    assert parse(["Well. <tool_call>\n{"], "", JSON_FORMAT, "length")[0] == [["text", "Well."]]


def test_hints_for_the_template():
    assert reasoning_kwargs(None) == {}
    assert reasoning_kwargs("low", "high") == {"reasoning_effort": "low", "verbosity": "high"}
    assert reasoning_kwargs("none")["enable_thinking"] is False
