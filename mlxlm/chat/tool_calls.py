"""The formats of tool calls, derived from a chat template or our own.

Every format has the same parts, of which the template's rendering of known calls shows the text:

    prefix NAME between ARGUMENTS (separator NAME between ARGUMENTS)* suffix

The arguments are a JSON object, or an object with keys and strings of its own, or are written one by one, with tags:

    (prefix KEY between VALUE suffix)*
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import count, product
from typing import Any

from mlxlm.chat.messages import Message, Tool, ToolCall
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


@dataclass(frozen=True)
class ObjectFormat:
    """How a model writes arguments as one object that isn't JSON: {key:<|"|>text<|"|>,n:1}, or (key="text", n=1).

    Objects in parentheses have JSON as their values, in which strings may also be in single quotes, and True, False and
    None are allowed. In braces, objects within the arguments are written like these.

    Attributes:
        open: "{" or "(".
        between: The text between a key and its value.
        separator: The text between arguments.
        quote: The text before and after a string. Unless it is a quotation mark, there are no escapes.
    """

    open: str
    between: str
    separator: str
    quote: str

    @property
    def close(self) -> str:
        """The text after the last argument."""
        return {"{": "}", "(": ")"}[self.open]

    @property
    def is_python(self) -> bool:
        """Whether the object is in parentheses, like the arguments of a function in Python."""
        return self.open == "("

    def render(self, arguments: Mapping[str, Any]) -> str:
        """Return arguments as text."""
        members = self.separator.join(f"{key}{self.between}{self.render_value(v)}" for key, v in arguments.items())
        return f"{self.open}{members}{self.close}"

    def render_value(self, value: Any) -> str:
        """Return a value as text."""
        if isinstance(value, str):
            if self.is_python:
                value = json.dumps(value, ensure_ascii=False)[1:-1]
                value = value.replace("'", "\\'") if self.quote == "'" else value
            return f"{self.quote}{value}{self.quote}"
        if self.is_python:
            constant = value is None or isinstance(value, bool)
            return str(value) if constant else json.dumps(value, ensure_ascii=False)
        if isinstance(value, Mapping):
            return self.render(value)
        if isinstance(value, list):
            return f"[{self.separator.join(map(self.render_value, value))}]"
        return json.dumps(value)


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls.

    Attributes:
        prefix: The text before the name of the first call.
        between: The text between a name and its arguments. A number in it is that of the call.
        suffix: The text after the last arguments.
        separator: The text between arguments and the next name; None if a text has only one call.
        arguments: The format of the arguments; None if they are a JSON object.
    """

    prefix: str
    between: str
    suffix: str
    separator: str | None
    arguments: ArgumentFormat | ObjectFormat | None = None

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
        bodies = (
            call.name + re.sub(r"\d+", str(n), self.between) + self._render_arguments(call.parsed_arguments())
            for n, call in enumerate(calls)
        )
        return f"{self.prefix}{(self.separator or self.suffix + self.prefix).join(bodies)}{self.suffix}"

    def _render_arguments(self, arguments: Mapping[str, Any]) -> str:
        tags = self.arguments
        if tags is None:
            return json.dumps(arguments, ensure_ascii=False)
        if isinstance(tags, ObjectFormat):
            return tags.render(arguments)
        return "".join(f"{tags.prefix}{k}{tags.between}{argument_text(v)}{tags.suffix}" for k, v in arguments.items())


def argument_text(value: Any) -> str:
    """Return an argument as formats with tags have it: a string as it is, other values as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# Llama 3 may write this token before calls that are all of the answer. Its template doesn't show it.
PYTHON_TAG = "<|python_tag|>"

# For models whose template shows no tools or calls. Hermes and Qwen are trained on this markup.
JSON_FORMAT = ToolFormat(
    prefix='<tool_call>\n{"name": "',
    between='", "arguments": ',
    suffix="}\n</tool_call>",
    separator='}\n</tool_call>\n<tool_call>\n{"name": "',
)
# For models with these special tokens whose template shows tools and results, but no calls (LFM2).
PYTHON_FORMAT = ToolFormat(
    prefix="<|tool_call_start|>[",
    between="",
    suffix="]<|tool_call_end|>",
    separator=", ",
    arguments=ObjectFormat("(", "=", ", ", '"'),
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


SHORT_ID = 9  # characters: Mistral's templates refuse others


@dataclass(frozen=True)
class MessageStyle:
    """What a template expects of a message with calls, which the field's templates disagree about.

    Attributes:
        text_arguments: Arguments are JSON text, not a dict.
        null_content: An answer without text has None as its content, not "".
        short_ids: The ids of calls are nine letters or digits (Mistral).
        numbered_ids: They are as `number_calls` makes them (Kimi K2).
        reasoning_key: The field with the reasoning.
        has_text_before_results: Whether a message with calls can have reasoning and text, which precede the results.
        calls_as_text: The format of calls that are put in front of the content, since the template doesn't show them.
    """

    text_arguments: bool = False
    null_content: bool = False
    short_ids: bool = False
    numbered_ids: bool = False
    reasoning_key: str = "reasoning_content"
    has_text_before_results: bool = True
    calls_as_text: ToolFormat | None = None

    def to_dict(self, message: Message) -> dict[str, Any]:
        """Return a message as the template gets it: OpenAI's fields, those without a value left out."""
        values: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls and self.calls_as_text is not None:
            values["content"] = self.calls_as_text.render(message.tool_calls) + message.content
        elif message.tool_calls:
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
        return re.sub("[^a-zA-Z0-9]", "", id)[-SHORT_ID:].rjust(SHORT_ID, "0") if self.short_ids else id


def number_calls(messages: Sequence[Message]) -> list[Message]:
    """Return messages in which the ids of calls are functions.NAME:NUMBER, numbered from 0."""
    ids: dict[str | None, str] = {}
    numbers, numbered = count(), []
    for message in messages:
        calls = [replace(call, id=f"functions.{call.name}:{next(numbers)}") for call in message.tool_calls]
        ids |= {call.id: new.id for call, new in zip(message.tool_calls, calls, strict=True)}
        result_id = ids.get(message.tool_call_id, message.tool_call_id)
        numbered.append(replace(message, tool_calls=tuple(calls), tool_call_id=result_id))
    return numbered


_STYLES = [
    *(MessageStyle(text, null, short) for short, null, text in product((False, True), repeat=3)),
    MessageStyle(numbered_ids=True),
]
_Render = Callable[[Sequence[Message], Sequence[Tool], MessageStyle], str]

_NAMES = ("probe_function", "second_function")
_ARGUMENTS = {"probe_argument": "probe value", "second_argument": 90210}
_ID, _CONTENT, _RESULT = "call_probe00001", "PROBE ANSWER", "PROBE RESULT"
_ID_FIELD = r'(?:,\s*"\w+":\s*"[^"]*{0}"|"\w+":\s*"[^"]*{0}",\s*|\[CALL_ID\]\w*{0})'


def derive_format(render: _Render, special_tokens: Set[str]) -> tuple[ToolFormat, MessageStyle] | None:
    """Derive the format and style of a template from how it renders calls of a tool.

    Args:
        render: Renders messages and tools in a style, without a generation prompt. Raises TokenizerError for what the
            template refuses.
        special_tokens: Those of the model.

    Returns:
        None if the template doesn't show tools, calls and results, or the calls not as a name followed by arguments.
    """
    tools = [Tool(name) for name in _NAMES]
    question = Message("user", "?")
    has_python_tokens = {"<|tool_call_start|>", "<|tool_call_end|>"} <= special_tokens
    for style in [*_STYLES, MessageStyle(calls_as_text=PYTHON_FORMAT)] if has_python_tokens else _STYLES:
        calls = [_probe_call(0, style), _probe_call(1, style)]
        one, two = (Message("assistant", "", tool_calls=tuple(calls[:n])) for n in (1, 2))
        result = Message("tool", _RESULT, tool_call_id=calls[0].id, name=_NAMES[0])
        if style.numbered_ids:
            (one, result), [two] = number_calls([one, result]), number_calls([two])
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
            separator = _without_id(text[spans[0][2] : spans[1][0]], two) if len(spans) == 2 else None
        except TokenizerError:  # such as Llama 3's: "only supports single tool-calls"
            separator = None
        try:
            texts = replace(one, content=_CONTENT, reasoning_content="?")
            has_text = _CONTENT in render([question, texts, result], tools, style).partition(_RESULT)[0]
        except TokenizerError:
            has_text = False
        return replace(format, separator=separator), replace(style, has_text_before_results=has_text)
    return None


def _probe_call(number: int, style: MessageStyle) -> ToolCall:
    return ToolCall(style.call_id(f"{_ID}{number}"), _NAMES[number], json.dumps(_ARGUMENTS))


def _single_call_format(answer: str, text: str, message: Message) -> ToolFormat | None:
    """Compare the renderings of an answer and of a message with one call."""
    text = _after_header(answer, text)
    spans = _call_spans(text)
    if len(spans) != 1:
        return None
    name, arguments, end, format = spans[0]
    after = text[end:].rstrip()
    ends = [split_tags(behind)[::-1] for behind in (answer.rstrip().rpartition(_CONTENT)[2], after)]
    common = _common_length(*ends)
    if not common and all(pieces and len(pieces[0]) > 1 for pieces in ends):
        common = len(ends[1][0])  # a turn with calls ends with a special token of its own, such as <|eom_id|>
    parts = text[:name], text[name + len(_NAMES[0]) : arguments], after[: len(after) - common]
    prefix, between, suffix = (_without_id(part, message) for part in parts)
    if not prefix:
        return None
    return ToolFormat(prefix.lstrip(), between, suffix.rstrip(), None, format)


def _after_header(answer: str, text: str) -> str:
    """Return what is rendered in place of the probe's answer, and what follows."""
    return text[_common_length(split_tags(answer.partition(_CONTENT)[0]), split_tags(text)) :]


def split_tags(text: str) -> list[str]:
    """Split a text into characters and what looks like special tokens, which are compared as a whole."""
    return re.findall(r"<[^<>\s]*>|\[/?[A-Z_]+\]|(?s:.)", text)


def _common_length(one: list[str], other: list[str]) -> int:
    """Return the number of characters that both begin with."""
    return len("".join(os.path.commonprefix([one, other])))  # of lists, in spite of its name


_CallSpan = tuple[int, int, int, ArgumentFormat | ObjectFormat | None]


def _call_spans(text: str) -> list[_CallSpan]:
    """Return the start of the name, and the start, end and format of the arguments of the probe's calls in a text."""
    spans: list[_CallSpan] = []
    decoder = json.JSONDecoder()
    for match in re.finditer(f"({'|'.join(_NAMES)})(?=[^{{]*({{))", text):
        try:
            arguments, end = decoder.raw_decode(text, match.start(2))
        except ValueError:
            continue
        if arguments == _ARGUMENTS:
            spans.append((match.start(), match.start(2), end, None))
    for match in () if spans else _OBJECT_CALL.finditer(text):
        format = ObjectFormat(match["open"], *match.group("between", "separator", "quote"))
        spans.append((match.start(), match.start("open"), match.end(), format))
    return spans or list(filter(None, (_tagged_span(text, match) for match in _TAGGED_CALL.finditer(text))))


_OBJECT_CALL = re.compile(
    rf"(?:{'|'.join(_NAMES)})[^({{]*(?P<open>[({{])probe_argument(?P<between>[:=])(?P<quote>\S+)probe value(?P=quote)"
    r"(?P<separator>,\s*)second_argument(?P=between)90210[)}]"
)
_TAGGED_CALL = re.compile(
    rf"(?s:(?:{'|'.join(_NAMES)})(.*?)probe_argument(?P<between>.*?)probe value(.*?)second_argument(?P=between)90210)"
)


def _tagged_span(text: str, match: re.Match[str]) -> _CallSpan | None:
    """Return what `_call_spans` does for one call, if there are tags around each argument."""
    before, between, middle = match.groups()
    length = _common_length(split_tags(middle), split_tags(text[match.end() :]))
    prefix, suffix = middle[length:], middle[:length]
    if not (prefix.strip() and between.strip() and suffix.strip() and before.endswith(prefix)):
        return None
    start, end = match.end(1) - len(prefix), match.end() + length
    return match.start(), start, end, ArgumentFormat(prefix, between, suffix)


def _without_id(text: str, message: Message) -> str:
    """Remove the ids of calls: prompts can have them, models don't generate them."""
    for call in message.tool_calls:
        end = call.id[-SHORT_ID:]  # which some templates cut off
        text = re.sub(_ID_FIELD.format(end), "", text)
        if end in text:
            raise TokenizerError("the id of a call is part of its markup")
    return text
