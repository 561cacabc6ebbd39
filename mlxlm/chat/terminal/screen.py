"""What is seen of one answer: its reasoning, then the answer, in a terminal or as plain text."""

from __future__ import annotations

import os
import shutil
import sys
import time
from typing import Literal, Protocol

from mlxlm.chat.terminal.output import dim, is_dumb_terminal, printable, write

ReasoningDisplay = Literal["show", "dim", "hide"]


class Screen(Protocol):
    """Takes the pieces of an answer."""

    def status(self, text: str) -> None:
        """A line that is seen until the answer begins, where a line can be taken away again."""

    def push(self, text: str, reasoning: bool) -> None:
        """More of the answer, or of the reasoning before it."""

    def finish(self) -> None:
        """The answer is complete, or was left: end its last line."""


def open_screen(reasoning: ReasoningDisplay, markdown: bool) -> Screen:
    """The screen of standard output. Where that is no terminal the answer is plain text, and reasoning is part of it
    only with "show"."""
    if not sys.stdout.isatty():
        return PlainScreen(reasoning == "show")
    return PlainScreen(reasoning != "hide") if is_dumb_terminal() else TerminalScreen(reasoning, markdown)


class PlainScreen:
    """Text as it comes, for files, pipes, and terminals that can't move their cursor."""

    def __init__(self, show_reasoning: bool):
        self._with_thinking = show_reasoning
        self._thought = False

    def status(self, text: str) -> None:
        pass

    def push(self, text: str, reasoning: bool) -> None:
        if reasoning and not self._with_thinking or not text:
            return
        write("\n\n" + text if self._thought and not reasoning else text)
        self._thought = reasoning

    def finish(self) -> None:
        write("\n")


class TerminalScreen:
    """Reasoning dimmed, shown, or only counted; the answer as Markdown, or as the text that it is."""

    def __init__(self, reasoning: ReasoningDisplay, markdown: bool):
        from mlxlm.chat.terminal.live_tail import LiveTail
        from mlxlm.chat.terminal.markdown import MarkdownStream

        self._thinking = reasoning
        self._tail = LiveTail(_put, terminal_size)
        self._markdown = MarkdownStream(self._tail) if markdown else None
        self._at: Literal["start", "thinking", "answer"] = "start"
        self._thinking_since = 0.0
        self._line_is_open = False

    def status(self, text: str) -> None:
        if self._at == "start":
            self._tail.draw([_status_line(text)])

    def push(self, text: str, reasoning: bool) -> None:
        if not text:
            return
        if reasoning and self._at != "thinking":
            self._tail.draw([])
            self._at, self._thinking_since = "thinking", time.perf_counter()
        elif not reasoning and self._at != "answer":
            self._end_thinking()
            self._at = "answer"
        if reasoning and self._thinking == "hide":
            self._tail.draw([_status_line(f"thinking … {self._thought():.0f} s")])
        elif reasoning or self._markdown is None:
            text = printable(text)
            _put(dim(text) if reasoning and self._thinking == "dim" else text)
            self._line_is_open = not text.endswith("\n")
        else:
            self._markdown.push(text)

    def finish(self) -> None:
        if self._at != "answer":
            self._end_thinking()
        elif self._markdown is not None:
            self._markdown.finish()
        elif self._line_is_open:
            _put("\n")

    def _thought(self) -> float:
        return time.perf_counter() - self._thinking_since

    def _end_thinking(self) -> None:
        """The cursor is at the begin of a line then, below an empty one if there was reasoning."""
        if self._at == "start":
            self._tail.draw([])
        elif self._thinking == "hide":
            self._tail.draw([], [_status_line(f"(thought for {self._thought():.1f} s)"), ""])
        else:
            _put("\n\n" if self._line_is_open else "\n")
            self._line_is_open = False


def terminal_size() -> tuple[int, int]:
    """Columns and rows of the terminal on standard output as it is now."""
    try:
        columns, rows = os.get_terminal_size(sys.stdout.fileno())
    except OSError:
        columns, rows = 0, 0
    default = shutil.get_terminal_size()
    return columns or default.columns, rows or default.lines


def _status_line(text: str) -> str:
    """A line of the chat's own, no wider than the terminal."""
    return dim(text[: terminal_size()[0]])


def _put(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
