"""Tool calls: their markup, derived from a chat template or our own, and the parser of streamed answers.

Every format has the same parts, of which the template's rendering of known calls shows the text:

    prefix NAME between ARGUMENTS (separator NAME between ARGUMENTS)* suffix

The arguments are a JSON object or, in formats with tags, are written one by one:

    (prefix KEY between VALUE suffix)*
"""

from __future__ import annotations

import json
import os.path
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from mlxlm.chat.messages import Message, Tool, ToolCall
from mlxlm.chat.reasoning import partial_length
from mlxlm.generation.json_schema import resolve_reference
from mlxlm.utils.errors import TokenizerError


@dataclass(frozen=True)
class ArgumentFormat:
    """How a model writes an argument that isn't part of a JSON object. Strings are written as they are.

    Attributes:
        prefix: The text before the key.
        between: The text between the key and the value.
        suffix: The text after the value.
    """

    prefix: str
    between: str
    suffix: str

    def render(self, key: str, value: Any) -> str:
        """Return an argument as text."""
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        return f"{self.prefix}{key}{self.between}{text}{self.suffix}"


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls.

    Attributes:
        prefix: The text before the name of the first call.
        between: The text between a name and its arguments.
        suffix: The text after the last arguments.
        separator: The text between arguments and the next name; None if a text has only one call.
        argument: The format of each argument; None if the arguments are a JSON object.
    """

    prefix: str
    between: str
    suffix: str
    separator: str | None
    argument: ArgumentFormat | None = None

    @property
    def follows_text(self) -> bool:
        """Whether calls can follow text. Without other markup than JSON (Llama 3), they are all of the answer."""
        return bool(self.prefix.partition("{")[0].strip("[ \n"))

    @property
    def trigger(self) -> str:
        """The text that begins a call: the first word of the markup or, if there is only JSON, all up to the name."""
        return self.prefix.partition("{")[0].split()[0] if self.follows_text else self.prefix

    def render(self, calls: Sequence[ToolCall]) -> str:
        """Return calls as text, with JSON as `json.dumps` writes it."""
        bodies = (f"{call.name}{self.between}{self._render_arguments(call.parsed_arguments())}" for call in calls)
        return f"{self.prefix}{(self.separator or self.suffix + self.prefix).join(bodies)}{self.suffix}"

    def _render_arguments(self, arguments: Mapping[str, Any]) -> str:
        if self.argument is None:
            return json.dumps(arguments, ensure_ascii=False)
        return "".join(self.argument.render(key, value) for key, value in arguments.items())


# Llama 3 may write this token before calls that are all of the answer. Its template doesn't show it.
PYTHON_TAG = "<|python_tag|>"

# For models whose template shows no tools or calls. Hermes and Qwen are trained on this markup.
JSON_FORMAT = ToolFormat(
    prefix='<tool_call>\n{"name": "',
    between='", "arguments": ',
    suffix="}\n</tool_call>",
    separator='}\n</tool_call>\n<tool_call>\n{"name": "',
)
_INSTRUCTIONS = """\
You can call functions. These are their descriptions, with JSON schemas of their arguments:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments as JSON between <tool_call> tags, once for each call:
{example}
Then end your answer. The results follow between <tool_response> tags."""


def to_plain_messages(messages: Sequence[Message], tools: Sequence[Tool], system_role: bool) -> list[Message]:
    """Rewrite calls, results and tools for a template that doesn't know them: as text, in `JSON_FORMAT`.

    Results become messages of the user, since many templates refuse other roles. The tools are described at the end
    of the system message or, if there is no `system_role`, before the user's first message.
    """
    plain: list[Message] = []
    previous = ""
    for message in messages:
        if message.tool_calls:
            texts = filter(None, (message.content, JSON_FORMAT.render(message.tool_calls)))
            message = replace(message, content="\n".join(texts), tool_calls=(), ids=())
        if message.role == "tool":
            response = f"<tool_response>\n{message.content}\n</tool_response>"
            if previous == "tool":
                plain[-1] = replace(plain[-1], content=f"{plain[-1].content}\n{response}")
                continue
            plain.append(Message("user", response))
        else:
            plain.append(message)
        previous = message.role
    if tools:
        lines = "\n".join(json.dumps(tool.to_dict()["function"], ensure_ascii=False) for tool in tools)
        example = JSON_FORMAT.render([ToolCall("", "FUNCTION", '{"ARGUMENT": "VALUE"}')])
        text, role = _INSTRUCTIONS.format(tools=lines, example=example), "system" if system_role else "user"
        if not plain or plain[0].role != role:
            plain.insert(0, Message(role, ""))
        parts = (plain[0].content, text) if system_role else (text, plain[0].content)
        plain[0] = replace(plain[0], content="\n\n".join(filter(None, parts)))
    return plain


_SHORT_ID = 9  # characters: Mistral's templates refuse others
_CALL_NAME = re.compile(r"\s*([\w.-]+)")


@dataclass(frozen=True)
class MessageStyle:
    """What a template expects of a message with calls, which the field's templates disagree about.

    Attributes:
        text_arguments: Arguments are JSON text, not a dict.
        null_content: An answer without text has None as its content, not "".
        short_ids: The ids of calls are nine letters or digits (Mistral).
        reasoning_key: The field with the reasoning.
    """

    text_arguments: bool = False
    null_content: bool = False
    short_ids: bool = False
    reasoning_key: str = "reasoning_content"

    def to_dict(self, message: Message) -> dict[str, Any]:
        """Return a message as the template gets it: OpenAI's fields, those without a value left out."""
        values: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            values["content"] = message.content or (None if self.null_content else "")
            values["tool_calls"] = [self._call(call) for call in message.tool_calls]
        if message.tool_call_id is not None:
            values["tool_call_id"] = self.call_id(message.tool_call_id)
        if message.name is not None:
            values["name"] = message.name
        if message.reasoning_content is not None:
            values[self.reasoning_key] = message.reasoning_content
        return values

    def _call(self, call: ToolCall) -> dict[str, Any]:
        arguments = call.parsed_arguments()
        shown = json.dumps(arguments, ensure_ascii=False) if self.text_arguments else arguments
        return {"id": self.call_id(call.id), "type": "function", "function": {"name": call.name, "arguments": shown}}

    def call_id(self, id: str) -> str:
        """Return the id of a call as the template expects it."""
        return re.sub("[^a-zA-Z0-9]", "", id)[-_SHORT_ID:].rjust(_SHORT_ID, "0") if self.short_ids else id


_STYLES = [MessageStyle(text, null, short) for short, null, text in product((False, True), repeat=3)]
_Render = Callable[[Sequence[Message], Sequence[Tool], MessageStyle], str]

_NAMES = ("probe_function", "second_function")
_ARGUMENTS = {"probe_argument": "probe value", "second_argument": 90210}
_ID, _CONTENT, _RESULT = "call_probe00001", "PROBE ANSWER", "PROBE RESULT"
_ID_FIELD = r'(?:,\s*"\w+":\s*"[^"]*{0}"|"\w+":\s*"[^"]*{0}",\s*|\[CALL_ID\]\w*{0})'


def derive_format(render: _Render) -> tuple[ToolFormat, MessageStyle] | None:
    """Derive the format and style of a template from how it renders calls of a tool.

    Args:
        render: Renders messages and tools in a style, without a generation prompt. Raises TokenizerError for what the
            template refuses.

    Returns:
        None if the template doesn't show tools, calls and results, or not as a name followed by arguments in JSON or
        with tags around each.
    """
    tools = [Tool(name) for name in _NAMES]
    question = Message("user", "?")
    for style in _STYLES:
        calls = [_probe_call(0, style), _probe_call(1, style)]
        one, two = (Message("assistant", "", tool_calls=tuple(calls[:n])) for n in (1, 2))
        result = Message("tool", _RESULT, tool_call_id=calls[0].id, name=_NAMES[0])
        try:
            if _NAMES[1] not in render([question], tools, style):
                return None
            if _RESULT not in render([question, one, result], tools, style):
                continue
            answer = render([question, Message("assistant", _CONTENT)], tools, style)
            format = _single_call_format(answer, render([question, one], tools, style), one)
        except TokenizerError:
            continue
        if format is None:
            continue
        try:
            text = _after_header(answer, render([question, two], tools, style))
            spans = _call_spans(text)
            separator = _without_id(text[spans[0].end : spans[1].name], two) if len(spans) == 2 else None
        except TokenizerError:  # such as Llama 3's: "only supports single tool-calls"
            separator = None
        return replace(format, separator=separator), style
    return None


def _probe_call(number: int, style: MessageStyle) -> ToolCall:
    return ToolCall(style.call_id(f"{_ID}{number}"), _NAMES[number], json.dumps(_ARGUMENTS))


def _single_call_format(answer: str, text: str, message: Message) -> ToolFormat | None:
    """Compare the renderings of an answer and of a message with one call."""
    text = _after_header(answer, text)
    spans = _call_spans(text)
    if len(spans) != 1:
        return None
    name, arguments, end, argument = spans[0]
    after = text[end:]
    ends = [_pieces(behind)[::-1] for behind in (answer.rpartition(_CONTENT)[2], after)]
    common = _common_length(*ends)
    if not common and all(pieces and len(pieces[0]) > 1 for pieces in ends):
        common = len(ends[1][0])  # a turn with calls ends with a special token of its own, as with <|eom_id|>
    parts = text[:name], text[name + len(_NAMES[0]) : arguments], after[: len(after) - common]
    prefix, between, suffix = (_without_id(part, message) for part in parts)
    if not prefix:
        return None
    return ToolFormat(prefix.lstrip(), between, suffix.rstrip(), None, argument)


def _after_header(answer: str, text: str) -> str:
    """Return what is rendered in place of the probe's answer, and what follows."""
    return text[_common_length(_pieces(answer.partition(_CONTENT)[0]), _pieces(text)) :]


def _pieces(text: str) -> list[str]:
    """Split a text into characters and what looks like special tokens, which are compared as a whole."""
    return re.findall(r"<[^<>\s]*>|\[/?[A-Z_]+\]|(?s:.)", text)


def _common_length(one: list[str], other: list[str]) -> int:
    """Return the number of characters that both begin with."""
    return len("".join(os.path.commonprefix([one, other])))  # of lists, in spite of its name


class _CallSpan(NamedTuple):
    """Where a text has the name of a call, and where its arguments begin and end."""

    name: int
    arguments: int
    end: int
    argument: ArgumentFormat | None


def _call_spans(text: str) -> list[_CallSpan]:
    """Return where the calls of the probe are in a text."""
    spans = []
    decoder = json.JSONDecoder()
    for match in re.finditer(f"({'|'.join(_NAMES)})(?=[^{{]*({{))", text):
        try:
            arguments, end = decoder.raw_decode(text, match.start(2))
        except ValueError:
            continue
        if arguments == _ARGUMENTS:
            spans.append(_CallSpan(match.start(), match.start(2), end, None))
    return spans or list(filter(None, (_tagged_span(text, match) for match in _TAGGED_CALL.finditer(text))))


_KEYS, _VALUES = list(_ARGUMENTS), list(_ARGUMENTS.values())
_TAGGED_CALL = re.compile(
    rf"(?s:(?:{'|'.join(_NAMES)})(.*?){_KEYS[0]}(?P<between>.*?){_VALUES[0]}(.*?){_KEYS[1]}(?P=between){_VALUES[1]}(?!\d))"
)


def _tagged_span(text: str, match: re.Match[str]) -> _CallSpan | None:
    """Return where a call has its arguments, if there is a tag after each value."""
    before, between, middle = match.groups()
    length = _common_length(_pieces(middle), _pieces(text[match.end() :]))
    argument = ArgumentFormat(middle[length:], between, middle[:length])
    if not (argument.prefix.strip() and between.strip() and argument.suffix.strip()):
        return None
    if not before.endswith(argument.prefix):
        return None
    start = match.end(1) - len(argument.prefix)
    return _CallSpan(match.start(), start, match.end() + length, argument)


def _without_id(text: str, message: Message) -> str:
    """Remove the ids of calls: prompts can have them, models don't generate them."""
    for call in message.tool_calls:
        end = call.id[-_SHORT_ID:]  # which some templates cut off
        text = re.sub(_ID_FIELD.format(end), "", text)
        if end in text:
            raise TokenizerError("the id of a call is part of its markup")
    return text


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
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(_SHORT_ID))


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
        self._arguments: _JsonArguments | _TaggedArguments | None = None  # inside arguments
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
        end = _match(self._pending, lead, start)
        if end is None:
            return False
        name = _CALL_NAME.match(self._pending, end)
        if not self._pending[end:].strip() or (name and name.end() == len(self._pending)):
            raise _IncompleteError
        begin = _match(self._pending, self._format.between, name.end()) if name else None
        if name is None or begin is None:
            return False
        tags = self._format.argument
        starts = ["{"] if tags is None else [tags.prefix, *_pieces(self._format.suffix)[:1]]
        if all(_match(self._pending, text, begin) is None for text in starts):
            return False
        events.append(ToolCallStart(new_call_id(), name[1]))
        self._pending = self._pending[begin:].lstrip()
        self._arguments = (
            _JsonArguments() if tags is None else _TaggedArguments(tags, self._parameters.get(name[1], {}))
        )
        self._after_arguments, self._has_calls = False, True
        return True

    def _parse_arguments(self, arguments: _JsonArguments | _TaggedArguments, events: list[ToolEvent]) -> None:
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
    """Return where `literal` ends that begins at `start`, but for white space; None if it doesn't."""
    for character in literal:
        if character.isspace():
            continue
        while start < len(text) and text[start].isspace():
            start += 1
        if start == len(text):
            raise _IncompleteError
        if text[start] != character:
            return None
        start += 1
    return start


class _JsonArguments:
    """Parses arguments that are a JSON object, with which the streamed text begins.

    Attributes:
        ended: Whether the object has ended.
    """

    def __init__(self) -> None:
        self.ended = False
        self._depth = 0
        self._in_string = self._escaped = False

    def parse(self, text: str) -> tuple[str, int]:
        """Return what the next piece of the text adds to the JSON, and where it ends."""
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
                    self.ended = True
                    return text[: index + 1], index + 1
        return text, len(text)


class _TaggedArguments:
    """Parses arguments with tags to JSON.

    A value is JSON if it is valid and the schema of the argument doesn't ask for a string, and text otherwise. Text is
    passed on as it comes.

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

    def parse(self, text: str) -> tuple[str, int]:
        """Return what is decided by the text so far as JSON, and where that ends. Raises _IncompleteError."""
        return self._parse_key(text) if self._types is None else self._parse_value(text, self._types)

    def _parse_key(self, text: str) -> tuple[str, int]:
        start = _match(text, self._format.prefix, 0)
        if start is None:
            self.ended = True
            return ("{}" if self._json == "{" else "}"), 0
        tag = self._format.between.strip()
        space = self._format.between[self._format.between.index(tag) + len(tag) :]
        match = re.compile(r"\s*".join(map(re.escape, re.sub(r"\s", "", tag)))).search(text, start)
        if match is None or space.startswith(text[match.end() :]) and text[match.end() :] != space:
            raise _IncompleteError
        end = match.end() + (len(space) if text.startswith(space, match.end()) else 0)
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
            return json.dumps(text[:end], ensure_ascii=False)[1:-1] + '"' * bool(tag), end + len(tag)
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
    """Return the JSON of a value that may be JSON or a string."""
    try:
        value = json.loads(_PYTHON_WORDS.get(text.strip(), text), parse_constant=str)
    except (ValueError, RecursionError):
        value = text
    kind = _TYPES.get(type(value), "null")
    if "string" in types and kind not in types and not (kind == "integer" and "number" in types):
        value = text
    return json.dumps(value, ensure_ascii=False)
