"""Reasoning that a model writes between <think> and </think> before its answer."""

from __future__ import annotations

import re
from typing import Literal

OPEN, CLOSE = "<think>", "</think>"
_OPEN_AT_END = re.compile(rf"{OPEN}\s*\Z")


def open_think_tag(prompt: str) -> str:
    """Return the tag and whitespace at the end of `prompt` if the template opens the block itself, else ""."""
    match = _OPEN_AT_END.search(prompt)
    return match[0] if match else ""


def split(text: str) -> tuple[str, str]:
    """Return the reasoning and the answer of a complete text."""
    parser = ReasoningParser()
    pieces = [*parser.push(text), *parser.finish()]
    return "".join(t for t, reasoning in pieces if reasoning), "".join(t for t, reasoning in pieces if not reasoning)


class ReasoningParser:
    """Separates reasoning from the answer in a streamed text, however it is split into chunks.

    `push` and `finish` return `(text, is_reasoning)` pairs without the tags and the whitespace around them. Text that
    could be part of a tag is held back until that is decided. Only a block at the start counts, since an answer may
    mention the tags; a block that is never closed is all reasoning. If the template opens the block itself, push its
    opening tag first.
    """

    def __init__(self) -> None:
        self._state: Literal["start", "reasoning", "gap", "answer"] = "start"
        self._pending = ""
        self._has_reasoning = False  # whitespace before the first reasoning is dropped

    @property
    def reasoning(self) -> bool:
        """Whether the parser is inside the block."""
        return self._state == "reasoning"

    def push(self, text: str) -> list[tuple[str, bool]]:
        """Add text and return the pairs that are decided."""
        self._pending += text
        pieces: list[tuple[str, bool]] = []
        if self._state == "start":
            self._parse_start()
        if self.reasoning:
            pieces += self._parse_reasoning()
        if self._state == "gap":
            self._pending = self._pending.lstrip()
            self._state = "answer" if self._pending else "gap"
        if self._state == "answer" and self._pending:
            pieces.append((self._pending, False))
            self._pending = ""
        return pieces

    def finish(self) -> list[tuple[str, bool]]:
        """Return the text that was held back, when no more text comes."""
        text, self._pending = self._pending.rstrip() if self.reasoning else self._pending, ""
        return [(text, self.reasoning)] if text else []

    def _parse_start(self) -> None:
        text = self._pending.lstrip()
        if text.startswith(OPEN):
            self._state, self._pending = "reasoning", text.removeprefix(OPEN)
        elif not OPEN.startswith(text):
            self._state = "answer"

    def _parse_reasoning(self) -> list[tuple[str, bool]]:
        if not self._has_reasoning:
            self._pending = self._pending.lstrip()
        text, tag, rest = self._pending.partition(CLOSE)
        if tag:
            self._state = "gap"
            text, self._pending = text.rstrip(), rest
        else:
            decided = len(text[: len(text) - _partial_tag_length(text)].rstrip())
            text, self._pending = text[:decided], text[decided:]
        self._has_reasoning = self._has_reasoning or bool(text)
        return [(text, True)] if text else []


def _partial_tag_length(text: str) -> int:
    """Return how many characters at the end of `text` could start the closing tag."""
    return next(n for n in range(min(len(CLOSE) - 1, len(text)), -1, -1) if text.endswith(CLOSE[:n]))
