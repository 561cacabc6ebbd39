"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import Response

from mlxlm.chat.answer_parser import Part, Piece
from mlxlm.chat.messages import Message, ToolCall
from mlxlm.generation import GenerationOptions
from mlxlm.generation.result import TokenLogprobs
from mlxlm.server.conversation import Conversation, ToolFields, ToolUse, named_tool
from mlxlm.server.endpoints import routes
from mlxlm.server.errors import invalid, new_id
from mlxlm.server.models import ServedModel
from mlxlm.server.reply import ChoicesReply, Event, respond
from mlxlm.server.request_body import read_body
from mlxlm.server.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChoicesRequest,
    Fields,
    Format,
    JsonText,
    TemplateFields,
    TextContent,
    TextFormat,
)
from mlxlm.server.text import Text, describe_logprobs


class ToolFunction(Fields):
    """A function that the model may call."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(ToolFields):
    """An entry of `tools`."""

    function: ToolFunction | None = None

    @model_validator(mode="after")
    def _check(self) -> Tool:
        if self.function is None and not self.is_left_out:
            raise ValueError("a tool of the type function needs function")
        return self


class CalledFunction(Fields):
    """The function of a tool call in an assistant's message; its arguments are JSON text."""

    name: str
    arguments: JsonText


class MessageToolCall(Fields):
    """A tool call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Fields):
    """A message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: TextContent | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    function_call: CalledFunction | None = None
    tool_call_id: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("content", "a message with the role {role} needs content", {"role": self.role})
        return self

    def to_chat(self) -> Message:
        """The message for the chat template."""
        calls = [ToolCall(c.id or "", c.function.name, c.function.arguments) for c in self.tool_calls or ()]
        if self.function_call is not None:
            calls.append(ToolCall("", self.function_call.name, self.function_call.arguments))
        return Message(
            "tool" if self.role == "function" else self.role,
            self.content or self.refusal or "",
            tool_calls=tuple(calls),
            tool_call_id=self.tool_call_id,
            name=self.name,
            reasoning_content=self.reasoning_content,
        )


class ChatCompletionRequest(ChoicesRequest, TemplateFields):
    """The body of /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: Format = TextFormat()
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[ToolFunction] | None = Field(None, max_length=MAX_TOOLS)
    function_call: Any = None
    modalities: list[Literal["text"]] | None = None


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(request, ChatCompletionRequest)
    messages = [message.to_chat() for message in body.messages]
    conversation = Conversation(messages, body.template_kwargs(), _tool_use(body))
    return await respond(request, body, partial(_make_reply, body, conversation))


def _tool_use(body: ChatCompletionRequest) -> ToolUse:
    if not body.functions:
        return ToolUse.from_openai(body.tools, body.tool_choice, body.parallel_tool_calls)
    if body.tools:
        raise invalid("functions and tools (try: tools)", "functions")
    tools = [Tool(type="function", function=each) for each in body.functions]
    named = body.function_call
    return ToolUse.from_openai(tools, named_tool(named.get("name")) if isinstance(named, dict) else named, False)


async def _make_reply(body: ChatCompletionRequest, conversation: Conversation, model: ServedModel) -> _ChatCompletion:
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    texts = await conversation.answers(
        model, _options(body, model.defaults), body.eos_token_ids(model.eos_token_ids), body.n
    )
    return _ChatCompletion(model, texts, body, {"id": new_id("chatcmpl-"), "object": kind})


def _options(body: ChatCompletionRequest, defaults: GenerationOptions) -> GenerationOptions:
    wants_logprobs = bool(body.top_logprobs) if body.logprobs is None else body.logprobs
    return body.options(
        defaults,
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        json_schema=body.schema_of_format(body.response_format, "response_format"),
    )


class _ChatCompletion(ChoicesReply):
    body: ChatCompletionRequest

    def start_choice(self, text: Text) -> dict[str, Any]:
        return self._choice(text, {"role": "assistant", "content": ""})

    def choice(self, text: Text, piece: Piece | None) -> dict[str, Any]:
        if piece is None:
            return self._choice(text, {})
        if piece.part.kind != "call":
            return self._choice(text, {_NAMES[piece.part.kind]: piece.text})
        index = {"index": text.calls.index(piece.part)}
        if not piece.is_first:
            return self._choice(text, {"tool_calls": [{**index, "function": {"arguments": piece.text}}]})
        return self._choice(text, {"tool_calls": [{**index, **_call(piece.part, "")}]})

    def describe_logprobs(self, text: Text, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"content": describe_logprobs(entries, self.model.lm.tokenizer), "refusal": None}

    def complete_choice(self, text: Text) -> dict[str, Any]:
        content, reasoning = text.text_of("text"), text.text_of("reasoning")
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if text.calls:
            message |= {"content": content or None, "tool_calls": [_call(part, part.text) for part in text.calls]}
        if reasoning:
            message["reasoning_content"] = reasoning
        logprobs = self.describe_logprobs(text, text.logprobs) if text.request.options.logprobs is not None else None
        choice = {"index": text.index, "message": message, "logprobs": logprobs, "finish_reason": text.finish_reason}
        return self._in_legacy_form(choice, message)

    def _event(self, choice: dict[str, Any]) -> Event:
        return super()._event(self._in_legacy_form(choice, choice["delta"]))

    def _in_legacy_form(self, choice: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
        """A request with `functions` has an answer with `function_call`."""
        if self.body.functions:
            if calls := message.pop("tool_calls", None):
                message["function_call"] = calls[0]["function"]
            if choice["finish_reason"] == "tool_calls":
                choice["finish_reason"] = "function_call"
        return choice

    def _choice(self, text: Text, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": text.index, "delta": delta, "logprobs": None, "finish_reason": None}


_NAMES = {"text": "content", "reasoning": "reasoning_content"}


def _call(part: Part, arguments: str) -> dict[str, Any]:
    return {"id": part.call_id, "type": "function", "function": {"name": part.name, "arguments": arguments}}


ROUTES = routes("/chat/completions", chat_completions)
