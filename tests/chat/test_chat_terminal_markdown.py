"""Markdown on the screen: what is rendered, and that streaming it shows the same, prints once, and scrolls once."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.chat.terminal import markdown
from mlxlm.chat.terminal.live_lines import LiveLines
from mlxlm.chat.terminal.markdown_stream import MarkdownStream
from tests.chat.fake_terminal import Seen

LONG = """\
# A title with `code`

Text that is **bold**, *italic*, ~~gone~~ and `code`, with a [link](http://example.com/a) and 世界 wide 🎉 letters, long
enough to be wrapped.
Its second line.

<div>
kept</div>

```python
def f(n: int) -> int:
    '''Text of

    several lines.'''
    return "a" * 1000000000000000000000000000000000000000000000000000000000000000000000000000000000

```

1. one
2. two
   - inner **one**
     ```
     code
     ```
   - inner two

3. three

> a quote
> - of a list

| Name | Value |
|:-----|------:|
| one  | 1 |
| 三   | a longer cell with **bold** words |
| two |

---
The end
"""
LONG += "\n" + "".join(f"{i}. item {i} of a **long** list\n" for i in range(1, 41))
LONG += "\n```\n" + "".join(f"line {i}\n" for i in range(40)) + "```\n\n|a|b|\n|--|--|\n"
LONG += "".join(f"|{i}|{'w' * i}|\n" for i in range(30)) + "\nlast"


@pytest.fixture(autouse=True)
def colours(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def plain(lines):
    return [re.sub(r"\x1b\[[0-9;]*m", "", line).rstrip() for line in lines]


def rendered(text, columns=60):
    return plain(markdown.Renderer(columns).lines(text))


def streamed(text, columns, rows, rng, resized=()):
    """The terminal after `text` was pushed in small pieces, with frames at random moments."""
    seen = Seen(columns, rows)
    now = [0.0]

    def size():
        return seen.columns, rows

    stream = MarkdownStream(LiveLines(seen.write, size), size, clock=lambda: now[0])
    widths = iter(resized)
    at = above = 0
    while at < len(text):
        count = rng.randint(1, 12)
        stream.push(text[at : at + count])
        at += count
        now[0] += rng.choice([0.001, 1.0])
        assert len(seen.scrolled) >= above  # what scrolled off stays
        above = len(seen.scrolled)
        if resized and rng.random() < 0.02:
            seen.resize(next(widths, seen.columns))
    stream.finish()
    return seen


@pytest.mark.parametrize("columns, rows", [(12, 5), (31, 4), (60, 24), (80, 50)])
def test_streamed_text_looks_like_the_whole_text(columns, rows):
    rng = random.Random(columns)
    assert streamed(LONG, columns, rows, rng).lines == rendered(LONG, columns)


MARKUP = [
    "**", "*", "`", "```\n", "\n", "\n\n", "- ", "1. ", "> ", "# ", "|", "|-|-|\n", "    ", "a", "word ", "世", "<b>",
    "[x](y)", "&amp;", "\\", "~~", "---\n", "\t", "_",
]  # fmt: skip


@given(parts=st.lists(st.sampled_from(MARKUP), max_size=40), columns=st.integers(8, 40), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_any_text_streamed_on_a_high_screen_looks_like_the_whole_text(parts, columns, seed):
    text = "".join(parts)
    assert streamed(text, columns, 200, random.Random(seed)).lines == strip_end(rendered(text, columns))


def strip_end(lines):
    while lines and not lines[-1]:
        lines.pop()
    return lines


@pytest.mark.parametrize("start", ["\n\n", " \n", "# T\n\n"])
def test_a_paragraph_higher_than_the_screen(start):
    text = start + "word " * 200
    assert streamed(text, 30, 8, random.Random(1)).lines == strip_end(rendered(text, 30))


LONG_BLOCKS = [
    "```python\n" + "".join(f'x = {i}  # """\n\n' for i in range(400)) + "```\n\nEnd",
    "7. item\n" * 300 + "\nEnd",
    "".join(f"- item {i}\n\n  - inner\n" for i in range(150)) + "\nEnd",
    "".join(f"- item\n  ```\n  {i}\n  ```\n  more\n" for i in range(80)) + "\n1. one\n2. two",
]


@pytest.mark.parametrize("text", LONG_BLOCKS)
def test_what_is_printed_of_a_long_block_is_not_rendered_again(monkeypatch, text):
    most, lines = [0], markdown.Renderer.lines

    def noted(self, block, *number):
        most[0] = max(most[0], block.count("\n"))
        return lines(self, block, *number)

    monkeypatch.setattr(markdown.Renderer, "lines", noted)
    now, seen = iter(range(10**9)), Seen(60, 12)
    stream = MarkdownStream(LiveLines(seen.write, lambda: (60, 12)), lambda: (60, 12), clock=lambda: next(now))
    for piece in re.split(r"(?<=\n)", text):
        stream.push(piece)
    stream.finish()
    assert most[0] < 40
    assert seen.lines == rendered(text)


@given(text=st.text(max_size=60), columns=st.integers(2, 30))
@settings(max_examples=60)
def test_any_text_is_rendered_within_the_width_and_without_control_characters(text, columns):
    lines = rendered(text, columns)
    assert all(markdown.cell_len(line) <= columns for line in lines)
    assert all(line == "" or markdown.printable(line) == line for line in lines)


def test_a_window_that_changes_its_width_loses_nothing_and_repeats_nothing():
    words = " ".join(f"w{i}" for i in range(60))
    text = words + "\n\n- " + "\n- ".join(f"item {i}" for i in range(60)) + "\n\n" + words
    seen = streamed(text, 60, 20, random.Random(3), resized=[40, 30, 55, 70, 25])
    said = " ".join(seen.lines).split()
    expected = " ".join(rendered(text, 500)).split()
    assert "".join(said).replace("•", "") == "".join(expected).replace("•", "")


def test_a_finished_block_is_printed_once():
    written = []
    tail = LiveLines(written.append, lambda: (60, 24))
    stream = MarkdownStream(tail, lambda: (60, 24), clock=iter(range(10**6)).__next__)
    for piece in ("First paragraph.\n\n", "Second ", "one ", "grows.\n\n", "Third."):
        stream.push(piece)
    stream.finish()
    everything = "".join(written)
    assert everything.count("First") == 1
    assert everything.count("Second") == 1  # what is added to a line is written behind it


def test_what_is_unfinished_is_not_shown_half():
    shown = {
        "a **bo": "a **bo**", "a **bo*": "a **bo**", "a **": "a ", "a *it": "a *it*", "a `co": "a `co`",
        "2 * 3": "2 * 3", "x\n- ": "x", "x\n1": "x", "* item *it": "* item *it*", "```py\nx = 1\n``": "```py\nx = 1",
        "x\n|--": "x", "**b** c": "**b** c",
    }  # fmt: skip
    assert {text: markdown.close_open_markup(text) for text in shown} == shown


def test_names_with_underscores_stay_names():
    assert rendered("__init__ and snake_case_name") == ["__init__ and snake_case_name"]


def test_what_is_rendered():
    text = "# T\n\na **b** [c](http://d)\ne\n\n1. x\n2. y\n   - z\n\n> q\n\n```py\nf(1)\n```\n\n"
    text += "| A | B |\n|---|--:|\n| 1 | 2 |"
    assert rendered(text, 30) == [
        "T", "", "a b c (http://d)", "e", "", "1. x", "2. y", "   • z", "", "│ q", "", "```py", "f(1)", "```", "",
        "A   B", "─────", "1   2",
    ]  # fmt: skip


def test_html_entities_and_escapes_are_text():
    assert rendered("<b>x</b> &lt; &#27;[31m \x1b[31m") == ["<b>x</b> < \ufffd[31m \ufffd[31m"]


def test_without_colours_there_are_no_escapes(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in "".join(markdown.Renderer(60).lines(LONG))


def test_code_is_coloured_and_begins_where_the_line_does():
    (_, line, _) = markdown.Renderer(60).lines("```python\nreturn 1\n```")
    assert re.match(r"\x1b\[[0-9;]+mreturn\x1b", line)


def test_a_backslash_at_the_end_waits_for_what_follows():
    """It may become a line break, and isn't seen then."""
    assert markdown.is_open("one\\") and markdown.is_open("one\\\n") and not markdown.is_open("one\\ two")
