"""The formats of tool calls, derived from a chat template or our own.

Every format has the same parts, of which the template's rendering of known calls shows the text:

    prefix NAME between ARGUMENTS (separator NAME between ARGUMENTS)* suffix

The arguments are a JSON object or, in formats with tags, are written one by one:

    (prefix KEY between VALUE suffix)*
"""

from __future__ import annotations

import json
import os.path
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
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
        tags = self.argument
        if tags is None:
            return json.dumps(arguments, ensure_ascii=False)
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
        return re.sub("[^a-zA-Z0-9]", "", id)[-SHORT_ID:].rjust(SHORT_ID, "0") if self.short_ids else id


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
            separator = _without_id(text[spans[0][2] : spans[1][0]], two) if len(spans) == 2 else None
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
    ends = [split_tags(behind)[::-1] for behind in (answer.rpartition(_CONTENT)[2], after)]
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
    return text[_common_length(split_tags(answer.partition(_CONTENT)[0]), split_tags(text)) :]


def split_tags(text: str) -> list[str]:
    """Split a text into characters and what looks like special tokens, which are compared as a whole."""
    return re.findall(r"<[^<>\s]*>|\[/?[A-Z_]+\]|(?s:.)", text)


def _common_length(one: list[str], other: list[str]) -> int:
    """Return the number of characters that both begin with."""
    return len("".join(os.path.commonprefix([one, other])))  # of lists, in spite of its name


_CallSpan = tuple[int, int, int, ArgumentFormat | None]


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
    return spans or list(filter(None, (_tagged_span(text, match) for match in _TAGGED_CALL.finditer(text))))


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
