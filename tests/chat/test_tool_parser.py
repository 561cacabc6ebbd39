"""Calls in a stream: the same events however it is split, and no markup in the text."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxlm.chat.messages import ToolCall
from mlxlm.chat.reasoning import ReasoningParser
from mlxlm.chat.tool_formats import JSON_FORMAT, ToolFormat
from mlxlm.chat.tool_parser import ArgumentsDelta, TextDelta, ToolCallEnd, ToolCallParser, ToolCallStart, new_call_id
from tests.chat.test_tool_formats import FORMATS

ARGUMENTS = ['{"city": "Köln"}', "{}", '{"a": {"b": [{}, "}]{\\"\\\\"]}, "c": "</tool_call>[TOOL_CALLS]"}']
DISTINCT = list(dict.fromkeys(FORMATS.values()))


def parse(format, chunks, cut_off=False):
    """The text, the calls as (id, name, arguments, whether they ended), from the events of a stream."""
    ids = itertools.count()
    parser = ToolCallParser(format, lambda: f"id{next(ids)}")
    events = [event for chunk in chunks for event in parser.push(chunk)] + parser.finish(cut_off=cut_off)
    text, calls = "", []
    for event in events:
        match event:
            case TextDelta(new):
                assert new
                text += new
            case ToolCallStart(index, id, name):
                assert index == len(calls)
                calls.append([id, name, "", False])
            case ArgumentsDelta(index, new):
                assert index == len(calls) - 1 and not calls[-1][3]
                calls[-1][2] += new
            case ToolCallEnd(index):
                assert index == len(calls) - 1
                calls[-1][3] = True
    return text, calls


def calls_of(count):
    return [ToolCall(f"id{n}", name, ARGUMENTS[n]) for n, name in enumerate(["get_weather", "a", "x-1.y"][:count])]


def rendered(format, count, text=""):
    """An answer with calls, and what its parts are."""
    count = count if format.separator is not None else min(count, 1)
    calls = calls_of(count)
    expected = [[c.id, c.name, json.dumps(c.parsed_arguments(), ensure_ascii=False), True] for c in calls]
    text = text if format.follows_text or not calls else ""
    return text + (format.render(calls) if calls else ""), text.rstrip() if calls else text, expected


@pytest.mark.parametrize("count", range(4))
@pytest.mark.parametrize("format", DISTINCT, ids=lambda format: format.prefix)
def test_calls_after_text(format, count):
    for text in ("", "Let me see.\n\n", "<tool_cal [ { ``` a\n"):
        answer, expected, calls = rendered(format, count, text)
        assert parse(format, [answer]) == (expected, calls)
        assert parse(format, answer) == (expected, calls)
        for split in range(len(answer)):
            assert parse(format, [answer[:split], answer[split:]]) == (expected, calls)


pieces = st.sampled_from([
    "<tool_call>", "<tool_", "</tool_call>", "\n", " ", '{"name": "', "get", '", "arguments": ', '", "parameters": ',
    "{", "}", '"', "\\", "[TOOL_CALLS]", " [", "]", "}]", "```tool_code\n", "```", ",", "<|python_tag|>", "[ARGS]", "ü",
]) | st.text(max_size=3)  # fmt: skip
answers = st.lists(pieces | st.sampled_from([f.render(calls_of(1)) for f in DISTINCT]), max_size=12)


@given(st.sampled_from(DISTINCT), answers, st.lists(st.integers(1, 9), min_size=1), st.booleans())
def test_chunks_do_not_matter(format, parts, sizes, cut_off):
    answer = "".join(parts)
    chunks, position, size = [], 0, itertools.cycle(sizes)
    while position < len(answer):
        chunks.append(answer[position : (position := position + next(size))])
    assert parse(format, chunks, cut_off) == parse(format, [answer], cut_off)


@given(st.sampled_from(DISTINCT), st.text(st.sampled_from('<>[]{}`tol_ca\n "nme:TOLCAS|'), max_size=40))
def test_text_without_a_call_stays_as_it_is(format, text):
    """Also what looks like the beginning of markup."""
    answer, calls = parse(format, text)
    assert calls or answer == text


@pytest.mark.parametrize("format", DISTINCT, ids=lambda format: format.prefix)
def test_an_answer_that_is_cut_off(format):
    """At every character: a part of the text, of the calls, and no markup."""
    answer, text, calls = rendered(format, 3, "See: ")
    lengths = []
    for end in range(len(answer)):
        cut_text, cut_calls = parse(format, [answer[:end]], cut_off=True)
        assert text.startswith(cut_text.rstrip())
        for got, whole in zip(cut_calls, calls, strict=False):
            assert got[:2] == whole[:2] and whole[2].startswith(got[2]) and got[3] == (got[2] == whole[2])
        lengths.append(sum(len(call[2]) for call in cut_calls))
    assert lengths == sorted(lengths) and lengths[-1] >= sum(len(call[2]) for call in calls) - 1


def test_what_only_looks_like_markup_is_text():
    for text in ("a <tool_call", "<tool_call> is a tag", '<tool_call>\n{"name": 5}', '<tool_call>\n{"name": "a"', "<"):
        assert parse(JSON_FORMAT, text) == (text, [])
    assert parse(JSON_FORMAT, "a <tool_call", cut_off=True) == ("a", [])
    assert parse(JSON_FORMAT, "a \n", cut_off=True) == ("a \n", [])


def test_white_space_in_markup_does_not_matter():
    compact = '<tool_call>{"name":"get","arguments":\n{"a": 1} }  </tool_call>\n<tool_call>{"name":"b","arguments":{}}'
    calls = [["id0", "get", '{"a": 1}', True], ["id1", "b", "{}", True]]
    assert parse(JSON_FORMAT, compact) == ("", calls)


def test_text_after_calls():
    answer = JSON_FORMAT.render(calls_of(1)) + "\n\nDone.\n" + JSON_FORMAT.render(calls_of(1)) + "\n"
    text, calls = parse(JSON_FORMAT, answer)
    assert text == "\n\nDone." and [call[0] for call in calls] == ["id0", "id1"]


def test_json_is_a_call_only_where_an_answer_begins():
    call = FORMATS["llama3"].render(calls_of(1))
    assert parse(FORMATS["llama3"], call)[1] == parse(FORMATS["llama3"], f"\n<|python_tag|>{call}")[1] != []
    for text in (f"Like {call}", '{"name": "Bob", "age": 5}', "<|python_tag|>print(1)"):
        assert parse(FORMATS["llama3"], text) == (text, [])


def test_reasoning_comes_first():
    reasoning, parser = ReasoningParser(), ToolCallParser(JSON_FORMAT)
    answer = f"<think>\nI could <tool_call>.\n</think>\n\n{JSON_FORMAT.render(calls_of(1))}"
    events, thoughts = [], ""
    for character in answer:
        for text, is_reasoning in reasoning.push(character):
            thoughts += text if is_reasoning else ""
            events += [] if is_reasoning else parser.push(text)
    assert thoughts == "I could <tool_call>."
    assert isinstance(events[0], ToolCallStart) and isinstance(events[-1], ToolCallEnd)


def test_ids():
    ids = {new_call_id() for _ in range(50)}
    assert len(ids) == 50 and all(len(id) == 9 and id.isalnum() and id.isascii() for id in ids)


def test_a_format_of_one_call():
    assert ToolFormat("<call>", ":", "</call>", None).render(calls_of(2)).count("</call><call>") == 1
