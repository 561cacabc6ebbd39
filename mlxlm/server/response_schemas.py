"""The fields of requests to OpenAI's Responses API, and their conversion to messages for the chat template."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from mlxlm.chat.messages import Message, ToolCall
from mlxlm.server.errors import invalid
from mlxlm.server.schemas import MAX_MESSAGES, MAX_TOOLS, Fields, IgnoredFields, SamplingFields, StreamOptions, Text

_INCLUDES = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class InputItem(Fields):
    """An item of the input. Its type decides which fields it needs."""

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    id: str | None = None
    status: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    phase: str | None = None
    content: Text | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Text | None = None
    summary: Text | None = None
    encrypted_content: str | None = None


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class TextFormat(Fields):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextSettings(Fields):
    """`text`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(Fields):
    """`reasoning`. The reasoning itself is always returned; there are no summaries."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseTool(Fields):
    """An entry of `tools`."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_chat(self) -> dict[str, Any]:
        """The tool as in chat completions."""
        function = self.model_dump(exclude={"type"}, exclude_none=True)
        return {"type": "function", "function": function}


class ResponseRequest(SamplingFields, IgnoredFields):
    """The body of /v1/responses."""

    model: str | None = None
    input: Annotated[list[InputItem], BeforeValidator(_as_items), Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    tools: list[ResponseTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: list[_INCLUDES] | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None
    max_tool_calls: int | None = None  # no effect: it is about tools that OpenAI runs
    previous_response_id: str | None = None
    conversation: None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the request asks for log-probabilities."""
        return self.top_logprobs is not None or "message.output_text.logprobs" in (self.include or ())


def to_messages(body: ResponseRequest) -> list[Message]:
    """The messages for the chat template: the instructions, then the items.

    Reasoning and calls become part of the answer that they belong to.

    Raises:
        ApiError: An item lacks a field that its type needs.
    """
    messages = [Message("system", body.instructions)] if body.instructions else []
    reasoning: str | None = None
    for index, item in enumerate(body.input):
        where = f"input.{index}"
        if item.type == "reasoning":
            reasoning = item.content or item.summary or None
        elif item.type == "function_call_output":
            if item.call_id is None or item.output is None:
                raise invalid("an output needs call_id and output", where)
            messages.append(Message("tool", item.output, tool_call_id=item.call_id))
        elif item.type == "function_call":
            _add_call(messages, item, reasoning, where)
            reasoning = None
        else:
            if item.role is None or item.content is None:
                raise invalid("a message needs role and content", where)
            kept = reasoning if item.role == "assistant" else None
            messages.append(Message(item.role, item.content, reasoning_content=kept))
            reasoning = None
    return messages


def _add_call(messages: list[Message], item: InputItem, reasoning: str | None, where: str) -> None:
    """Add a call to the answer that it belongs to."""
    if item.call_id is None or item.name is None or item.arguments is None:
        raise invalid("a call needs call_id, name and arguments", where)
    call = ToolCall(item.call_id, item.name, item.arguments)
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if last is None:
        messages.append(Message("assistant", "", tool_calls=(call,), reasoning_content=reasoning))
    else:
        kept = last.reasoning_content or reasoning
        messages[-1] = Message("assistant", last.content, tool_calls=(*last.tool_calls, call), reasoning_content=kept)
