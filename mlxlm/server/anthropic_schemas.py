"""The fields of requests to Anthropic's Messages API, and their conversion to messages for the chat template."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from mlxlm.chat.messages import Message, ToolCall
from mlxlm.server.schemas import MAX_MESSAGES, MAX_TOOLS, Fields, SamplingFields, Strings, Text


class Block(Fields):
    """A content block of a message. Its type decides which fields it needs."""

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Text | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    # No effect: prompts are always cached, and there are no citations or server tools.
    cache_control: dict[str, Any] | None = None
    citations: Any = None
    caller: Any = None


_NEEDED = {"text": ("text",), "tool_use": ("id", "name", "input"), "tool_result": ("tool_use_id",)}


def _as_blocks(value: Any) -> Any:
    """Convert text to a block, and check what each type of block needs."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    for n, block in enumerate(value if isinstance(value, list) else ()):
        kind = block.get("type") if isinstance(block, dict) else None
        if kind in ("image", "document"):
            problem = "block {n} is of the type {kind}, and this server only reads text"
            raise PydanticCustomError("block", problem, {"n": n, "kind": kind})
        for name in _NEEDED.get(kind, ()) if isinstance(kind, str) else ():
            if block.get(name) is None:
                raise PydanticCustomError("block", "block {n} has no {name}", {"n": n, "name": name})
    return value


Blocks = Annotated[list[Block], BeforeValidator(_as_blocks)]


class AnthropicMessage(Fields):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class AnthropicTool(Fields):
    """A function that the model may call."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None  # no effect: arguments are always streamed

    def to_chat(self) -> dict[str, Any]:
        """The tool as in chat completions."""
        function = {"name": self.name, "description": self.description, "strict": self.strict}
        given = {name: value for name, value in function.items() if value is not None}
        return {"type": "function", "function": {**given, "parameters": self.input_schema}}


class Thinking(Fields):
    """`thinking`. `budget_tokens` has no effect: the model decides how long it thinks."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(Fields):
    """`output_config.format`."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    """`output_config`."""

    effort: str | None = None
    format: OutputFormat | None = None


def _check_edit(value: Any) -> Any:
    if isinstance(value, dict) and str(value.get("type")).startswith("clear_thinking_"):
        return value
    raise PydanticCustomError("edit", "this server can only clear earlier thinking from a conversation")


class ContextManagement(Fields):
    """`context_management`. It can only clear earlier thinking, which is up to the chat template."""

    edits: list[Annotated[dict[str, Any], BeforeValidator(_check_edit)]] | None = None


class CountTokensRequest(Fields):
    """The body of /v1/messages/count_tokens, whose fields /v1/messages also has."""

    model: str | None = None
    messages: list[AnthropicMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: Text | None = None
    tools: list[AnthropicTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: dict[str, Any] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: dict[str, Any] | None = None  # no effect: prompts are always cached
    context_management: ContextManagement | None = None


class MessagesRequest(CountTokensRequest, SamplingFields):
    """The body of /v1/messages."""

    max_tokens: int
    stop_sequences: Strings | None = None
    stream: bool | None = None
    # No effect.
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    inference_geo: str | None = None


def to_messages(body: CountTokensRequest) -> list[Message]:
    """The messages for the chat template. Tool results become messages, followed by the text that came with them."""
    messages = [Message("system", body.system)] if body.system else []
    for message in body.messages:
        results = [block for block in message.content if block.type == "tool_result"]
        for block in results:
            prefix = "Error: " if block.is_error else ""
            messages.append(Message("tool", prefix + (block.content or ""), tool_call_id=block.tool_use_id))
        if len(results) < len(message.content) or not results:
            messages.append(_to_message(message))
    return messages


def _to_message(message: AnthropicMessage) -> Message:
    blocks = message.content
    calls = [
        ToolCall(block.id or "", block.name or "", json.dumps(block.input, ensure_ascii=False))
        for block in blocks
        if block.type == "tool_use"
    ]
    thinking = "\n".join(block.thinking or "" for block in blocks if block.type == "thinking")
    text = "\n".join(block.text or "" for block in blocks if block.type == "text")
    return Message(message.role, text, tool_calls=tuple(calls), reasoning_content=thinking or None)
