"""The messages of a conversation, in the fields of OpenAI's chat API, and the functions that a model can call."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlxlm.generation.result import ToolCall as ToolCall  # noqa: PLC0414 - a part of messages
from mlxlm.utils.errors import TokenizerError

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}\Z")
_CALL_HINT = '{"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": "{}"}}'
_TOOL_HINT = '{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", ...}}}'


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: "system", "developer", "user", "assistant" or "tool" (the result of a call).
        content: The text.
        ids: Tokens of a generated answer, if known.
        tool_calls: Calls at the end of an answer.
        tool_call_id: The call that a result belongs to.
        name: The function that a result comes from, or the name of the speaker.
        reasoning_content: Reasoning before an answer. Templates that don't know it, or only show that of the last
            answers, leave it out.
        weight: In fine-tuning, 0 for an answer that is not learned.
    """

    role: str
    content: str
    ids: tuple[int, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    weight: int = 1

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Message:
        """Read a message of OpenAI's fine-tuning format. Arguments of calls can also be a dict, as in most templates.

        Raises:
            TokenizerError: A field has another type.
        """
        for key in ("tool_call_id", "name", "reasoning_content"):
            if not isinstance(value.get(key), str | None):
                raise TokenizerError(f"the {key} of a message is {value[key]!r}"[:100], "a text")
        calls = value.get("tool_calls") or []
        if not isinstance(calls, list):
            raise TokenizerError(f"tool_calls is {calls!r}"[:100], f"[{_CALL_HINT}]")
        return cls(
            value["role"],
            value["content"],
            tool_calls=tuple(_parse_call(call) for call in calls),
            tool_call_id=value.get("tool_call_id"),
            name=value.get("name"),
            reasoning_content=value.get("reasoning_content"),
            weight=value["weight"],
        )

    def map_strings(self, function: Callable[[str], str]) -> Message:
        """Return a copy with `function` applied to each of its strings, also to those inside the arguments of calls."""

        def optional(text: str | None) -> str | None:
            return None if text is None else function(text)

        calls = [
            ToolCall(
                function(call.id),
                function(call.name),
                json.dumps(map_strings(call.parsed_arguments(), function), ensure_ascii=False),
            )
            for call in self.tool_calls
        ]
        return replace(
            self,
            content=function(self.content),
            tool_calls=tuple(calls),
            tool_call_id=optional(self.tool_call_id),
            name=optional(self.name),
            reasoning_content=optional(self.reasoning_content),
        )


def _parse_call(value: Any) -> ToolCall:
    function = value.get("function") if isinstance(value, Mapping) else None
    name, arguments = (function.get(key) if isinstance(function, Mapping) else None for key in ("name", "arguments"))
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    call_id = (value.get("id") if isinstance(value, Mapping) else None) or ""
    if not (isinstance(name, str) and isinstance(arguments, str) and isinstance(call_id, str)):
        raise TokenizerError(f"{value!r}"[:100] + " is not a tool call", _CALL_HINT)
    return ToolCall(call_id, name, arguments)


def map_strings(value: Any, function: Callable[[str], str]) -> Any:
    """Return a copy of a JSON value, which may have messages in it, with `function` applied to each string and key."""
    try:
        return _map_strings(value, function)
    except RecursionError:
        raise TokenizerError("arguments or tools are nested too deeply", "fewer levels") from None


def _map_strings(value: Any, function: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Message):
        return value.map_strings(function)
    if isinstance(value, Mapping):
        return {_map_strings(key, function): _map_strings(item, function) for key, item in value.items()}
    return [_map_strings(item, function) for item in value] if isinstance(value, list | tuple) else value


def check_final_message(messages: Sequence[Message]) -> None:
    """Raise TokenizerError if the last message is not a text that the model could continue."""
    if not messages or messages[-1].role != "assistant" or messages[-1].tool_calls:
        hint = 'a last message with the role "assistant" and without tool_calls'
        raise TokenizerError("the last message is not a text of the assistant that could be continued", hint)


@dataclass(frozen=True)
class Tool:
    """A function that a model can call.

    Attributes:
        name: Its name.
        description: What it does.
        parameters: JSON schema of its arguments.
        strict: Whether a keyword of the schema that can't be enforced is an error.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return what a chat template shows. It has all fields, since templates fail without them."""
        function = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}


def parse_tools(tools: Sequence[Any]) -> tuple[Tool, ...]:
    """Parse the `tools` of a request: {"type": "function", "function": {"name": ..., "parameters": ...}} each.

    Raises:
        TokenizerError: One of them isn't a function, or two have the same name.
    """
    parsed: dict[str, Tool] = {}
    for number, value in enumerate(tools, 1):
        tool = _parse_tool(value, f"tool {number}")
        if tool.name in parsed:
            raise TokenizerError(f"there are two tools with the name {tool.name}", "a name of its own for each")
        parsed[tool.name] = tool
    return tuple(parsed.values())


def _parse_tool(value: Any, where: str) -> Tool:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or value.get("type", "function") != "function":
        raise TokenizerError(f"{where} is not a function", _TOOL_HINT)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.match(name):
        hint = "up to 128 letters, digits, _, - and ."
        raise TokenizerError(f"{where} has {'no name' if name is None else f'the name {name!r}'}"[:100], hint)
    given = {key: function[key] for key in ("description", "parameters", "strict") if function.get(key) is not None}
    kinds = {
        "description": (str, "a text"),
        "parameters": (Mapping, "a JSON schema"),
        "strict": (bool, "true or false"),
    }
    for key, (kind, expected) in kinds.items():
        if key in given and not isinstance(given[key], kind):
            raise TokenizerError(f"the {key} of the tool {name} is {given[key]!r}"[:100], expected)
    return Tool(name, **given)
