"""Reasoning is separated from the answer however a text is split, and no part of a tag is shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxlm.chat.reasoning import _ALL_TAGS, HARMONY, THINK, ReasoningParser, effort_variables, reasoning_tags, split


def streamed(parts, tags=THINK):
    parser = ReasoningParser(tags)
    pieces = [piece for part in parts for piece in parser.push(part)] + parser.finish()
    assert all(text for text, _ in pieces)
    return tuple("".join(text for text, reasoning in pieces if reasoning is wanted) for wanted in (True, False))


@pytest.mark.parametrize(
    ("text", "thought", "answer"),
    [
        ("Hello.", "", "Hello."),
        ("<think>\nHm, so.\n</think>\n\nHello.", "Hm, so.", "Hello."),
        (" \n<think>Hm</think>Hello. ", "Hm", "Hello. "),
        ("<think>\n\n</think>\n\nHello.", "", "Hello."),
        ("<think>never closed </thin", "never closed </thin", ""),
        ("<think>a < b\n", "a < b", ""),
        ("<think>", "", ""),
        ("<thi", "", "<thi"),
        (" indented", "", " indented"),
        ("Write <think>x</think> in it", "", "Write <think>x</think> in it"),
        ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        ("a</think>b", "", "a</think>b"),
        ("<think>a</thi</think>b", "a</thi", "b"),
        ("<think>a \n </think >  </think> b", "a \n </think >", "b"),
        ("", "", ""),
        ("  ", "", "  "),
    ],
)
def test_whole_texts_and_single_characters(text, thought, answer):
    assert split(text) == (thought, answer)
    assert streamed(text) == (thought, answer)


@given(st.lists(st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", "think>", "<", " ", "\n", "a", "b."])))
def test_any_split_gives_the_same_and_nothing_is_lost(parts):
    text = "".join(parts)
    assert streamed(parts) == streamed(text) == split(text)
    thought, answer = split(text)
    if not text.lstrip().startswith("<think>"):
        assert (thought, answer) == ("", text)
    elif "</think>" in text:
        inside, _, behind = text.lstrip().removeprefix("<think>").partition("</think>")
        assert (thought, answer) == (inside.strip(), behind.lstrip())
    else:
        assert (thought, answer) == (text.lstrip().removeprefix("<think>").strip(), "")


def test_what_is_decided_is_not_held_back():
    parser = ReasoningParser()
    assert parser.push("He") == [("He", False)]
    parser = ReasoningParser()
    assert parser.push("<think>a b") == [("a b", True)] and parser.reasoning
    assert parser.push(" <") == [] and parser.push("c") == [(" <c", True)]
    assert parser.push("</think>d") == [("d", False)] and not parser.reasoning


@pytest.mark.parametrize("tags", [tags for tags in _ALL_TAGS if tags is not HARMONY], ids=lambda tags: tags.open)
def test_the_tags_of_all_families(tags):
    text = f"{tags.open}\nHm < [so.{tags.close}\n\nHello."
    assert reasoning_tags(f"{{{{ '{tags.open}' }}}}") is tags
    assert streamed([text], tags) == streamed(text, tags) == ("Hm < [so.", "Hello.")
    assert streamed([tags.render("Hm.", "Hello.")], tags) == ("Hm.", "Hello.")
    opened = tags.open_tag(f"?{tags.open}\n")
    assert streamed([opened + tags.start_of_answer(opened), "Hello."], tags) == ("", "Hello.")
    assert tags.start_of_answer("") == tags.render("", "") == ""


def test_the_variables_of_an_effort():
    assert effort_variables("low") == {"reasoning_effort": "low", "enable_thinking": True}
    assert effort_variables("none") == {"reasoning_effort": "none", "enable_thinking": False}
    assert effort_variables(None) == {}


def test_the_tag_that_a_template_opens():
    assert THINK.open_tag("<|assistant|>\n<think>\n") == "<think>\n"
    assert THINK.open_tag("<|assistant|>\n<think>\n\n</think>\n\n") == ""
    assert THINK.open_tag("<|assistant|>\n") == ""
