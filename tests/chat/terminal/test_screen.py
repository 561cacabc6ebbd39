"""Display of reasoning and answers in a terminal and over a pipe."""

import io
import re
import sys

import pytest

from mlxlm.chat.terminal import screen
from tests.chat.terminal.fake_terminal import FakeTerminal

PIECES = [("I think", True), (" so.", True), ("", False), ("The **ans", False), ("wer**.\n\nDone", False)]


@pytest.fixture
def seen(monkeypatch):
    terminal = FakeTerminal(40, 10)
    # A terminal turns a line end into a new line at its begin.
    monkeypatch.setattr(screen, "_put", lambda text: terminal.write(re.sub(r"\r?\n", "\r\n", text)))
    monkeypatch.setattr(screen, "terminal_size", lambda: (40, 10))
    monkeypatch.setenv("TERM", "xterm")
    return terminal


def show(reasoning, markdown, pieces=PIECES):
    drawn = screen.TerminalScreen(reasoning, markdown)
    drawn.status("reading 9 tokens")
    for piece in pieces:
        drawn.push(*piece)
    drawn.finish()
    return drawn


@pytest.mark.parametrize("reasoning", ["show", "dim"])
def test_reasoning_stands_before_the_answer(seen, reasoning):
    show(reasoning, True)
    assert seen.lines == ["I think so.", "", "The answer.", "", "Done"]


def test_hidden_reasoning_is_counted(seen):
    show("hide", True)
    assert re.fullmatch(r"\(thought for \d+\.\d s\)", seen.lines[0])
    assert seen.lines[1:] == ["", "The answer.", "", "Done"]


def test_text_without_markdown(seen):
    show("dim", False)
    assert seen.lines == ["I think so.", "", "The **answer**.", "", "Done"]


def test_an_empty_answer_leaves_nothing(seen):
    show("dim", True, [])
    assert seen.lines == []


def test_reasoning_alone_ends_its_line(seen):
    show("dim", True, PIECES[:2])
    assert seen.lines == ["I think so."]


def test_a_pipe_gets_reasoning_only_with_show(monkeypatch):
    answer = "The **answer**.\n\nDone\n"
    for reasoning, expected in (("hide", answer), ("dim", answer), ("show", f"I think so.\n\n{answer}")):
        monkeypatch.setattr(sys, "stdout", io.StringIO())
        pipe = screen.open_screen(reasoning, True)
        for piece in PIECES:
            pipe.push(*piece)
        pipe.finish()
        assert sys.stdout.getvalue() == expected
