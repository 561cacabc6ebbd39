"""Reasoning: what a model thinks between <think> and </think> before it answers."""

from __future__ import annotations

import re
from enum import Enum

OPEN, CLOSE = "<think>", "</think>"
_OPENED = re.compile(rf"{OPEN}\s*\Z")


def open_think_tag(prompt: str) -> str:
    """The tag at the end of `prompt`, with the space behind it, where a template opens the block itself; else ""."""
    match = _OPENED.search(prompt)
    return match[0] if match else ""


def split(text: str) -> tuple[str, str]:
    """The reasoning and the answer of a whole text."""
    splitter = ReasoningParser()
    pieces = [*splitter.push(text), *splitter.finish()]
    return "".join(t for t, reasoning in pieces if reasoning), "".join(t for t, reasoning in pieces if not reasoning)


class _At(Enum):
    START = "the text may begin with a block"
    THINKING = "inside the block"
    BEHIND = "behind the block, before the answer"
    ANSWER = "the answer"


class ReasoningParser:
    """Tells reasoning from answer in a streamed text, however the text is split up.

    What `push` and `finish` return are `(text, thinking)` pairs: the text without the tags and the space around
    them. What could be part of a tag is held back until it is decided, so that no part of a tag is ever among them.
    A block counts only where the text begins, since an answer may speak of these tags; one that is never closed is
    all reasoning. A template that opens the block itself leaves a text without its first tag: push that first.
    """

    def __init__(self) -> None:
        self._at = _At.START
        self._held = ""
        self._thought = False  # whether there is reasoning yet: the space before it goes

    @property
    def reasoning(self) -> bool:
        """Whether the block is open."""
        return self._at is _At.THINKING

    def push(self, text: str) -> list[tuple[str, bool]]:
        """Add text; return what of it is decided."""
        self._held += text
        pieces: list[tuple[str, bool]] = []
        if self._at is _At.START:
            self._open()
        if self._at is _At.THINKING:
            pieces += self._think()
        if self._at is _At.BEHIND:
            self._held = self._held.lstrip()
            self._at = _At.ANSWER if self._held else _At.BEHIND
        if self._at is _At.ANSWER and self._held:
            pieces.append((self._held, False))
            self._held = ""
        return pieces

    def finish(self) -> list[tuple[str, bool]]:
        """What was held back, once no more text comes."""
        text, self._held = self._held.rstrip() if self.reasoning else self._held, ""
        return [(text, self.reasoning)] if text else []

    def _open(self) -> None:
        text = self._held.lstrip()
        if text.startswith(OPEN):
            self._at, self._held = _At.THINKING, text.removeprefix(OPEN)
        elif not OPEN.startswith(text):
            self._at = _At.ANSWER

    def _think(self) -> list[tuple[str, bool]]:
        if not self._thought:
            self._held = self._held.lstrip()
        text, tag, behind = self._held.partition(CLOSE)
        if tag:
            self._at = _At.BEHIND
            text, self._held = text.rstrip(), behind
        else:
            certain = len(text[: len(text) - _beginning(text)].rstrip())
            text, self._held = text[:certain], text[certain:]
        self._thought = self._thought or bool(text)
        return [(text, True)] if text else []


def _beginning(text: str) -> int:
    """How many characters at the end of `text` could be the beginning of the closing tag."""
    return next(n for n in range(min(len(CLOSE) - 1, len(text)), -1, -1) if text.endswith(CLOSE[:n]))
