"""Markdown in the terminal: what is rendered, and that a streamed text ends up looking like the whole text."""

import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from mlxlm.chat.terminal.markdown import LiveTail, MarkdownStream, Renderer, block_starts
from mlxlm.utils.formatting import printable
from tests.chat.terminal.fake_terminal import FakeTerminal

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
LONG += "\n" + "".join(f"{i}. item {i} of a **long** list\n" for i in range(1, 21))
LONG += "\n```\n" + "".join(f"line {i}\n" for i in range(20)) + "```\n\n|a|b|\n|--|--|\n"
LONG += "".join(f"|{i}|{'w' * i}|\n" for i in range(30)) + "\nlast"


@pytest.fixture(autouse=True)
def colors(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def plain_lines(lines):
    """Lines without their SGR sequences."""
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]


def rendered(text, columns=60):
    """The lines of a whole text, block by block."""
    lines, source = [], text.split("\n")
    starts = block_starts(text)
    for start, end in zip(starts, [*starts[1:], len(source)], strict=False):
        block = plain_lines(Renderer(columns).lines("\n".join(source[start:end])))
        lines += [""] * bool(lines and block) + block
    return lines


def streamed(text, columns, rows, seed=0, resized=()):
    """The terminal after `text` was pushed in small pieces, with frames at random moments."""
    rng, terminal, now = random.Random(seed), FakeTerminal(columns, rows), [0.0]
    stream = MarkdownStream(LiveTail(terminal.write, lambda: (terminal.columns, rows)), clock=lambda: now[0])
    widths = iter(resized)
    position = 0
    while position < len(text):
        count = rng.randint(1, 12)
        stream.push(text[position : position + count])
        position += count
        now[0] += rng.choice([0.001, 0.001, 0.001, 1.0])
        if resized and rng.random() < 0.02:
            terminal.resize(next(widths, terminal.columns))
    stream.finish()
    return terminal


@pytest.mark.parametrize(("columns", "rows"), [(40, 14), (80, 50)])
def test_streamed_text_looks_like_the_whole_text(columns, rows):
    assert streamed(LONG, columns, rows).lines == rendered(LONG, columns)


MARKUP = [
    "**", "*", "`", "```\n", "\n", "\n\n", "- ", "1. ", "> ", "# ", "|", "|-|-|\n", "    ", "a", "word ", "世", "<b>",
    "[x](y)", "![x](y)", "&amp;", "\\", "~~", "---\n", "\t", "_", "&#27;", "\x1b[31m", "9999999. ",
]  # fmt: skip


@given(parts=st.lists(st.sampled_from(MARKUP), max_size=40), columns=st.integers(2, 40), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_any_text_fits_the_width_has_no_control_characters_and_streams_to_the_same(parts, columns, seed):
    text = "".join(parts)
    lines = rendered(text, columns)
    assert all(cell_len(line) <= columns and printable(line) == line for line in lines)
    if columns >= 8:
        assert streamed(text, columns, 200, seed).lines == rendered(printable(text), columns)


def test_a_paragraph_higher_than_the_screen_scrolls():
    text = "\n\n" + "word " * 200
    assert streamed(text, 30, 8).lines == rendered(text, 30)


def test_a_long_code_block_scrolls_and_its_lines_are_written_once_above_the_screen():
    text = "```python\n" + "".join(f"x{i} = {i}\n" for i in range(100)) + "```\n\nEnd"
    assert streamed(text, 40, 10).lines == rendered(text, 40)


def test_a_table_higher_than_the_screen_is_printed_when_it_is_finished():
    text = "|a|b|\n|--|--|\n" + "".join(f"|{i}|{'w' * (i % 20)}|\n" for i in range(40)) + "\nEnd"
    assert streamed(text, 40, 10).lines == rendered(text, 40)


def test_a_resized_window_loses_nothing():
    words = " ".join(f"w{i}" for i in range(60))
    text = words + "\n\n- " + "\n- ".join(f"item{i}" for i in range(60)) + "\n\n" + words
    lines = streamed(text, 60, 20, 3, resized=[40, 30, 55, 70, 25]).lines
    assert set(re.findall(r"\w+\d", text)) <= set(re.findall(r"\w+\d", " ".join(lines)))


def test_a_tail_that_ends_leaves_nothing():
    terminal = FakeTerminal(20, 5)
    tail = LiveTail(terminal.write, lambda: (20, 5))
    for lines in (["one", "two"], []):
        tail.draw(lines)
        assert terminal.lines == lines


def test_a_finished_block_is_written_once():
    written, now = [], [0]
    stream = MarkdownStream(LiveTail(written.append, lambda: (60, 24)), clock=lambda: now[0])
    for piece in ("First paragraph.\n\n", "Second ", "one ", "grows.\n\n", "Third.", " Fourth.\n\n", "Fifth."):
        stream.push(piece)
        now[0] += 1
    stream.finish()
    assert "".join(written).count("First") == 1
    assert "".join(written).count("Third") == 2  # drawn, and redrawn with Fourth behind it


def test_what_is_rendered():
    text = "# T\n\na **b** [c](http://d)\ne\n\n1. x\n2. y\n   - z\n\n> q\n\n```py\nf(1)\n```\n\n"
    text += "| A | B |\n|---|--:|\n| 1 | 2 |\n\n---"
    assert rendered(text, 30) == [
        "T", "", "a b c (http://d)", "e", "", " 1. x", " 2. y", "     • z", "", "▌ q", "", "```py", "f(1)", "```", "",
        "A   B", "─────", "1   2", "", "─" * 30,
    ]  # fmt: skip


def test_names_with_underscores_stay_names():
    assert rendered("__init__ and snake_case_name") == ["__init__ and snake_case_name"]


def test_html_entities_and_escapes_are_text():
    assert rendered("<b>x</b> &lt; &#27;[31m \x1b[31m") == ["<b>x</b> < \ufffd[31m \ufffd[31m"]
    assert "\x1b" not in "".join(plain_lines(Renderer(60).lines("```\x1b[0m\n\x1b[31m\n```")))


def test_no_color_leaves_no_escapes(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in "".join(Renderer(60).lines(LONG))


def test_code_is_highlighted_and_starts_in_the_first_column():
    (_, line, _) = Renderer(60).lines("```python\nreturn 1\n```")
    assert re.match(r"\x1b\[[0-9;]+mreturn\x1b", line)
