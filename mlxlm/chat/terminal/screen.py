"""The screen of an answer, with its reasoning: in a terminal, or as plain text."""

from __future__ import annotations

import os
import sys
import time
from typing import Literal

from mlxlm.chat.reasoning import split
from mlxlm.chat.terminal.output import dim, is_dumb_terminal, write
from mlxlm.utils.formatting import printable

ReasoningDisplay = Literal["show", "dim", "hide"]


def push_text(screen: Screen, text: str) -> None:
    """Display the text of an answer, with its reasoning."""
    reasoning, answer = split(text)
    screen.push(reasoning, True)
    screen.push(answer, False)


def open_screen(reasoning: ReasoningDisplay, markdown: bool) -> Screen:
    """Return the screen of standard output. If that is not a terminal, only "show" displays reasoning."""
    if not sys.stdout.isatty():
        return PlainScreen(reasoning == "show")
    return PlainScreen(reasoning != "hide") if is_dumb_terminal() else TerminalScreen(reasoning, markdown)


class PlainScreen:
    """Plain text, for files, pipes, and terminals that can't move their cursor."""

    def __init__(self, show_reasoning: bool):
        self._show_reasoning = show_reasoning
        self._after_reasoning = False

    def status(self, text: str) -> None:
        """Show nothing: the line could not be removed again."""

    def push(self, text: str, reasoning: bool) -> None:
        """Display more text."""
        if reasoning and not self._show_reasoning or not text:
            return
        write("\n\n" + text if self._after_reasoning and not reasoning else text)
        self._after_reasoning = reasoning

    def finish(self) -> None:
        """End the last line."""
        write("\n")


class TerminalScreen:
    """Shows reasoning (dimmed, plain, or only its duration), then the answer as Markdown or plain text."""

    def __init__(self, reasoning: ReasoningDisplay, markdown: bool):
        from mlxlm.chat.terminal.markdown import LiveTail, MarkdownStream  # rich takes time to import

        self._reasoning = reasoning
        self._tail = LiveTail(_put, terminal_size)
        self._markdown = MarkdownStream(self._tail) if markdown else None
        self._state: Literal["start", "reasoning", "answer"] = "start"
        self._reasoning_start = 0.0
        self._line_is_open = False

    def status(self, text: str) -> None:
        """Show a line until the answer starts."""
        if self._state == "start":
            self._tail.draw([_status_line(text)])

    def push(self, text: str, reasoning: bool) -> None:
        """Display more text."""
        if not text:
            return
        if reasoning and self._state != "reasoning":
            self._tail.draw([])
            self._state, self._reasoning_start = "reasoning", time.perf_counter()
        elif not reasoning and self._state != "answer":
            self._end_reasoning()
            self._state = "answer"
        if reasoning and self._reasoning == "hide":
            self._tail.draw([_status_line(f"thinking … {self._reasoning_seconds():.0f} s")])
        elif reasoning or self._markdown is None:
            text = printable(text)
            _put(dim(text) if reasoning and self._reasoning == "dim" else text)
            self._line_is_open = not text.endswith("\n")
        else:
            self._markdown.push(text)

    def finish(self) -> None:
        """End the last line."""
        if self._state != "answer":
            self._end_reasoning()
        elif self._markdown is not None:
            self._markdown.finish()
        elif self._line_is_open:
            _put("\n")

    def _reasoning_seconds(self) -> float:
        return time.perf_counter() - self._reasoning_start

    def _end_reasoning(self) -> None:
        """Move the cursor to the start of a line, below an empty one if there was reasoning."""
        if self._state == "start":
            self._tail.draw([])
        elif self._reasoning == "hide":
            self._tail.draw([], [_status_line(f"(thought for {self._reasoning_seconds():.1f} s)"), ""])
        else:
            _put("\n\n" if self._line_is_open else "\n")
            self._line_is_open = False


Screen = PlainScreen | TerminalScreen


def terminal_size() -> tuple[int, int]:
    """Return the current columns and rows of the terminal on standard output."""
    columns, rows = os.get_terminal_size(sys.stdout.fileno())
    return columns or 80, rows or 24


def _status_line(text: str) -> str:
    """Return a dimmed line, no wider than the terminal."""
    return dim(text[: terminal_size()[0]])


def _put(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
