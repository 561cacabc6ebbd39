"""Parses tool calls in a streamed answer, however it is split into chunks."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass

from mlxlm.chat.tool_formats import PYTHON_TAG, ToolFormat

_NAME = re.compile(r"\s*([\w.-]+)")
_ID_LENGTH = 9  # Mistral's templates refuse others


@dataclass(frozen=True)
class TextDelta:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins.

    Attributes:
        index: The number of the call, from 0.
        id: A new id.
        name: The function.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """A piece of the arguments of call `index`, as generated: the pieces join to a JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolCallEnd:
    """The arguments of call `index` are complete."""

    index: int


ToolEvent = TextDelta | ToolCallStart | ArgumentsDelta | ToolCallEnd


def new_call_id() -> str:
    """Return a random id."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_ID_LENGTH))


class _IncompleteError(Exception):
    """The text ends before it is decided whether it matches."""


class ToolCallParser:
    """Separates calls from text, without their markup and the white space around it.

    Text that could begin a call is held back until that is decided. White space in the markup doesn't matter. After
    reasoning, push only the text of the answer.
    """

    def __init__(self, format: ToolFormat, new_id: Callable[[], str] = new_call_id):
        self._format, self._new_id = format, new_id
        self._pending = ""
        self._calls = 0
        self._arguments: _ObjectEnd | None = None  # inside arguments
        self._after_arguments = False
        self._text_only = False  # no call can follow

    def push(self, text: str) -> list[ToolEvent]:
        """Add text and return what is decided."""
        self._pending += text
        events: list[ToolEvent] = []
        try:
            while self._pending:
                if self._arguments is not None:
                    self._parse_arguments(self._arguments, events)
                elif self._after_arguments:
                    self._parse_after_arguments(events)
                else:
                    self._parse_text(events)
        except _IncompleteError:
            pass
        return events

    def finish(self, *, cut_off: bool = False) -> list[ToolEvent]:
        """Return the text that was held back, when no more text comes.

        Args:
            cut_off: Whether the answer was cut off, as by `max_tokens`: then the beginning of a call isn't text.
        """
        text, self._pending = self._pending, ""
        if self._arguments is not None or self._after_arguments:
            return []
        start = self._call_start(text)
        if cut_off and start < len(text):
            text = text[:start].rstrip()
        return [TextDelta(text)] if text and (text.strip() or not self._calls) else []

    def _call_start(self, text: str) -> int:
        """Return where a call begins in `text`, or may begin when more text comes; its length if nowhere."""
        if self._text_only:
            return len(text)
        if not self._format.follows_text:
            return len(text) - len(text.lstrip())
        trigger = self._format.trigger
        start = text.find(trigger)
        partial = (n for n in range(min(len(trigger) - 1, len(text)), 0, -1) if text.endswith(trigger[:n]))
        return len(text) - next(partial, 0) if start < 0 else start

    def _parse_text(self, events: list[ToolEvent]) -> None:
        """Parse text up to a call. White space stays pending, since a call may follow."""
        start = self._call_start(self._pending)
        if text := self._pending[:start].rstrip():
            events.append(TextDelta(text))
            start, self._pending = start - len(text), self._pending[len(text) :]
        if start == len(self._pending):
            raise _IncompleteError
        tagged = not self._format.follows_text and self._pending[start] == PYTHON_TAG[0]
        if self._start_call((PYTHON_TAG if tagged else "") + self._format.prefix, start, events):
            return
        if self._format.follows_text:
            end = start + len(self._format.trigger)
            events.append(TextDelta(self._pending[:end]))
            self._pending = self._pending[end:]
        self._text_only = not self._format.follows_text

    def _start_call(self, lead: str, start: int, events: list[ToolEvent]) -> bool:
        """Parse the markup before a call and its name; False if that isn't what is there."""
        end = self._match(lead, start)
        if end is None:
            return False
        name = _NAME.match(self._pending, end)
        if not self._pending[end:].strip() or (name and name.end() == len(self._pending)):
            raise _IncompleteError
        brace = self._match(self._format.between + "{", name.end()) if name else None
        if name is None or brace is None:
            return False
        events.append(ToolCallStart(self._calls, self._new_id(), name[1]))
        self._pending = self._pending[brace - 1 :]
        self._arguments, self._after_arguments = _ObjectEnd(), False
        self._calls += 1
        return True

    def _parse_arguments(self, arguments: _ObjectEnd, events: list[ToolEvent]) -> None:
        end = arguments.find(self._pending)
        events.append(ArgumentsDelta(self._calls - 1, self._pending[:end]))
        self._pending = "" if end is None else self._pending[end:]
        if end is not None:
            events.append(ToolCallEnd(self._calls - 1))
            self._arguments, self._after_arguments = None, True

    def _parse_after_arguments(self, events: list[ToolEvent]) -> None:
        separator = self._format.separator
        if separator is not None and self._start_call(separator, 0, events):
            return
        end = self._match(self._format.suffix, 0)
        self._after_arguments, self._text_only = False, not self._format.follows_text
        self._pending = self._pending[end:]

    def _match(self, literal: str, start: int) -> int | None:
        """Return where `literal` ends that begins at `start`; None if it doesn't."""
        for character in literal:
            if character.isspace():
                continue
            while start < len(self._pending) and self._pending[start].isspace():
                start += 1
            if start == len(self._pending):
                raise _IncompleteError
            if self._pending[start] != character:
                return None
            start += 1
        return start


class _ObjectEnd:
    """Finds the end of a JSON object in a streamed text that begins with it."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def find(self, text: str) -> int | None:
        """Return where the object ends in the next piece of the text; None if it doesn't."""
        for index, character in enumerate(text):
            if self._in_string:
                self._in_string = self._escaped or character != '"'
                self._escaped = not self._escaped and character == "\\"
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    return index + 1
        return None
