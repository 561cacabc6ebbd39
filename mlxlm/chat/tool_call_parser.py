"""The parser of streamed answers with tool calls."""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxlm.chat.messages import Tool
from mlxlm.chat.reasoning import partial_length
from mlxlm.chat.tool_calls import PYTHON_TAG, SHORT_ID, ArgumentFormat, ObjectFormat, ToolFormat, split_tags
from mlxlm.generation.json_schema import resolve_reference


@dataclass(frozen=True)
class TextDelta:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """Text of the reasoning."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """A call begins.

    Attributes:
        id: A new id.
        name: The function.
    """

    id: str
    name: str


@dataclass(frozen=True)
class ArgumentsDelta:
    """A piece of the arguments of the call: the pieces join to a JSON object."""

    text: str


ToolEvent = TextDelta | ReasoningDelta | ToolCallStart | ArgumentsDelta


def new_call_id() -> str:
    """Return a random id for a call."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(SHORT_ID))


_CALL_NAME = re.compile(r"\s*([\w.-]+)")


class _IncompleteError(Exception):
    """The text ends before it is decided whether it matches."""


class ToolCallParser:
    """Separates calls from text, without their markup and the white space around it.

    Text that could begin a call is held back until that is decided. White space in the markup doesn't matter. After
    reasoning, push only the text of the answer.
    """

    def __init__(self, format: ToolFormat, tools: Sequence[Tool] = ()):
        """Parse an answer.

        Args:
            format: How the model writes calls.
            tools: The functions, whose parameters say which arguments are strings if they aren't written as JSON.
        """
        self._format = format
        self._parameters = {tool.name: tool.parameters for tool in tools}
        self._pending = ""
        self._has_calls = False
        self._arguments: _ObjectArguments | _TaggedArguments | None = None  # inside arguments
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
        return [TextDelta(text)] if text and (text.strip() or not self._has_calls) else []

    def _call_start(self, text: str) -> int:
        """Return where a call begins in `text`, or may begin when more text comes; its length if nowhere."""
        if self._text_only:
            return len(text)
        if not self._format.follows_text:
            return len(text) - len(text.lstrip())
        trigger = self._format.trigger
        start = text.find(trigger)
        return len(text) - partial_length(text, trigger) if start < 0 else start

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
        end = _match(self._pending, lead, start)
        if end is None:
            return False
        name = _CALL_NAME.match(self._pending, end)
        if not self._pending[end:].strip() or (name and name.end() == len(self._pending)):
            raise _IncompleteError
        begin = _match(self._pending, self._format.between, name.end()) if name else None
        if name is None or begin is None:
            return False
        format = self._format.arguments
        if isinstance(format, ArgumentFormat):
            starts = [format.prefix, *split_tags(self._format.suffix.lstrip())[:1]]
        else:
            starts = ["{" if format is None else format.open]
        if all(_match(self._pending, text, begin) is None for text in starts):
            return False
        events.append(ToolCallStart(new_call_id(), name[1]))
        self._pending = self._pending[begin:].lstrip()
        if isinstance(format, ArgumentFormat):
            self._arguments = _TaggedArguments(format, self._parameters.get(name[1], {}))
        else:
            self._arguments = _ObjectArguments(format)
        self._after_arguments, self._has_calls = False, True
        return True

    def _parse_arguments(self, arguments: _ObjectArguments | _TaggedArguments, events: list[ToolEvent]) -> None:
        text, end = arguments.parse(self._pending)
        if text:
            events.append(ArgumentsDelta(text))
        self._pending = self._pending[end:]
        if arguments.ended:
            self._arguments, self._after_arguments = None, True

    def _parse_after_arguments(self, events: list[ToolEvent]) -> None:
        separator = self._format.separator
        if separator is not None and self._start_call(separator, 0, events):
            return
        end = _match(self._pending, self._format.suffix, 0)
        self._after_arguments, self._text_only = False, not self._format.follows_text
        self._pending = self._pending[end:]


def _match(text: str, literal: str, start: int) -> int | None:
    """Return where `literal` ends that begins at `start`, but for white space and other numbers; None if it doesn't."""
    for character in literal:
        if character.isspace():
            continue
        while start < len(text) and text[start].isspace():
            start += 1
        if start == len(text):
            raise _IncompleteError
        if character.isdigit() and text[start].isdigit():  # part of a number
            start = next((n for n in range(start, len(text)) if not text[n].isdigit()), len(text))
            if start == len(text):
                raise _IncompleteError
        elif text[start] != character:
            return None
        else:
            start += 1
    return start


class _ObjectArguments:
    """Parses arguments that are one object, with which the streamed text begins, to JSON. JSON stays as it is.

    Attributes:
        ended: Whether the object has ended.
    """

    def __init__(self, format: ObjectFormat | None):
        self.ended = False
        self._is_json = format is None
        quote = '"' if format is None else format.quote
        self._quotes = ['"', "'"] if format is not None and format.is_python else [quote]
        self._open: list[str] = []  # the brackets that aren't closed
        self._quote = ""  # that ends the string, if the text is inside one
        self._is_key = False  # whether a key comes next

    def parse(self, text: str) -> tuple[str, int]:
        """Return what is decided by the text so far as JSON, and where that ends. Raises _IncompleteError."""
        pieces, position = list[str](), 0
        while not self.ended and position < len(text):
            piece, end = self._parse_string(text, position) if self._quote else self._parse_token(text, position)
            if end == position:
                break
            pieces.append(piece)
            position = end
        if not position:
            raise _IncompleteError
        return "".join(pieces), position

    def _parse_token(self, text: str, start: int) -> tuple[str, int]:
        for quote in self._quotes:
            beginning = text[start : start + len(quote)]
            if beginning == quote:
                self._quote = quote
                return '"', start + len(quote)
            if quote.startswith(beginning):
                return "", start
        character = text[start]
        if character in "{[(":
            self._open.append(character)
        elif character in "}])":
            self._open.pop()
            self.ended = not self._open
        if character in "{[(,:=":
            self._is_key = character not in ":=" and self._open[-1] != "["
        if character in _PUNCTUATION or character.isspace():
            return character if self._is_json else _PUNCTUATION.get(character, ""), start + 1
        word = (_KEY if self._is_key else _WORD).match(text, start)
        if word is None:
            return "", start
        return _value_json(word[0], STRING if self._is_key else set()), word.end()

    def _parse_string(self, text: str, start: int) -> tuple[str, int]:
        if pattern := _STRINGS.get(self._quote):
            content, closing = next(pattern.finditer(text, start)).groups()
            end, piece = start + len(content), _ESCAPED.sub(_convert_escape, content)
        else:
            content, closing, _ = text[start:].partition(self._quote)
            end = start + len(content) - (0 if closing else partial_length(content, self._quote))
            piece = _json_characters(text[start:end])
        if closing:
            piece, end, self._quote = piece + '"', end + len(closing), ""
        return piece, end


_PUNCTUATION = {"{": "{", "}": "}", "(": "{", ")": "}", "[": "[", "]": "]", ",": ", ", ":": ": ", "=": ": "}
_KEY, _WORD = re.compile(r"[^:=]+?(?=\s*[:=])"), re.compile(r"[^\s,\])}]+(?=[\s,\])}])")
# By their quotes, strings with escapes: the content, and what ends it. Some templates don't escape an apostrophe.
_STRINGS = {
    '"': re.compile(r'(?s)((?:[^"\\]|\\.)*)("?)'),
    "'": re.compile(r"(?s)((?:[^'\\]|\\.|'(?!\s*(?:[,:\])}]|\Z)))*)((?:'(?=\s*[,:\])}]))?)"),
}
_ESCAPED = re.compile(r'(?s)\\.|["\x00-\x1f]')


def _convert_escape(match: re.Match[str]) -> str:
    """Return a character of a string, which may be an escape, as it is in JSON."""
    if len(match[0]) == 2 and match[0][1] in '"\\/bfnrtu':
        return match[0]
    return "'" if match[0] == "\\'" else _json_characters(match[0])


def _json_characters(text: str) -> str:
    """Return a text as it is within a string in JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class _TaggedArguments:
    """Parses arguments with tags to JSON.

    A value is JSON if it is valid and the schema of the argument doesn't ask for a string, and text otherwise. Text of
    arguments that can only be strings is passed on as it comes.

    Attributes:
        ended: Whether no argument follows.
    """

    def __init__(self, format: ArgumentFormat, parameters: Mapping[str, Any]):
        self.ended = False
        self._format, self._parameters = format, parameters
        properties = parameters.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._types: set[str] | None = None  # of the value that is being parsed
        self._json = "{"  # before the next argument
        tag = format.suffix.strip()
        self._ends = format.suffix[: format.suffix.index(tag)] + tag, tag
        tag = format.between.strip()
        self._space = format.between.rpartition(tag[-1])[2]
        self._between = re.compile(r"\s*".join(map(re.escape, re.sub(r"\s", "", tag))))

    def parse(self, text: str) -> tuple[str, int]:
        """Return what is decided by the text so far as JSON, and where that ends. Raises _IncompleteError."""
        return self._parse_key(text) if self._types is None else self._parse_value(text, self._types)

    def _parse_key(self, text: str) -> tuple[str, int]:
        start = _match(text, self._format.prefix, 0)
        if start is None:
            self.ended = True
            return ("{}" if self._json == "{" else "}"), 0
        match = self._between.search(text, start)
        if match is None or (space := text[match.end() :]) != self._space and self._space.startswith(space):
            raise _IncompleteError
        end = match.end() + len(self._space) * text.startswith(self._space, match.end())
        key = text[start : match.start()].strip()
        self._types = value_types(self._parameters, self._properties.get(key))
        json_text = f"{self._json}{json.dumps(key, ensure_ascii=False)}: " + '"' * (self._types == STRING)
        self._json = ", "
        return json_text, end

    def _parse_value(self, text: str, types: set[str]) -> tuple[str, int]:
        found = [(text.index(end), end) for end in self._ends if end in text]
        end, tag = min(found, default=(len(text) - partial_length(text, *self._ends), ""))
        if tag:
            self._types = None
        elif types != STRING or not end:
            raise _IncompleteError
        if types == STRING:
            return _json_characters(text[:end]) + '"' * bool(tag), end + len(tag)
        return _value_json(text[:end], types), end + len(tag)


STRING = {"string"}
_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # templates in Jinja write these


def value_types(root: Mapping[str, Any], schema: Any, depth: int = 8) -> set[str]:
    """Return the types of JSON that a schema within `root` allows; none if it doesn't say."""
    schema = resolve_reference(root, schema)
    if not isinstance(schema, Mapping) or not depth:
        return set()
    if "const" in schema or isinstance(schema.get("enum"), list):
        return {_TYPES.get(type(value), "null") for value in schema.get("enum", [schema.get("const")])}
    if isinstance(types := schema.get("type"), str | list):
        return {types} if isinstance(types, str) else set(map(str, types))
    choices = schema.get("anyOf", schema.get("oneOf"))
    found = [value_types(root, choice, depth - 1) for choice in choices] if isinstance(choices, list) else []
    return set().union(*found) if all(found) else set()


def _value_json(text: str, types: set[str]) -> str:
    """Return the JSON of a value: the value itself if it is JSON of an allowed type, or else a string of it."""
    value = _PYTHON_WORDS.get(text.strip(), text.strip())
    try:
        kind = _TYPES.get(type(json.loads(value, parse_constant=int)), "null")  # int() refuses NaN and Infinity
    except (ValueError, RecursionError):
        kind = "string"
    kinds = {kind, "number"} if kind == "integer" else {kind}
    is_text = kind == "string" or "string" in types and not kinds & types
    return json.dumps(text, ensure_ascii=False) if is_text else value
