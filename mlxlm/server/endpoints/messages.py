"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxlm.chat.answer_parser import Part, Piece
from mlxlm.chat.messages import Message, ToolCall
from mlxlm.generation import GenerationResult
from mlxlm.server.conversation import Conversation, ToolFields, ToolUse, check_offered, functions_of, named_tool
from mlxlm.server.endpoints import routes
from mlxlm.server.errors import invalid, new_id
from mlxlm.server.models import ServedModel
from mlxlm.server.reply import Event, Reply, respond
from mlxlm.server.request_body import read_body
from mlxlm.server.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Fields,
    Schema,
    TemplateFields,
    TextContent,
    TextFormat,
    TextRequest,
    text_of_part,
)
from mlxlm.server.text import Text
from mlxlm.tokenizer import Tokenizer


class Block(Fields):
    """A content block of a message. Its type decides which fields it needs."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: TextContent | None = None
    is_error: bool | None = None
    thinking: str | None = None

    @property
    def is_left_out(self) -> bool:
        """Whether it is a result of Anthropic's own tools, for example."""
        return self.type not in ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")


_NEEDED = {"text": ("text",), "tool_use": ("id", "name", "input"), "tool_result": ("tool_use_id",)}


def _as_blocks(value: Any) -> Any:
    """Convert text and documents to blocks of text, and check what each type of block needs."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    return [_as_block(block, n) for n, block in enumerate(value)] if isinstance(value, list) else value


def _as_block(block: Any, n: int) -> Any:
    kind = block.get("type") if isinstance(block, dict) else None
    if kind in ("image", "document", "search_result"):
        return {"type": "text", "text": text_of_part(block, n)}
    for name in _NEEDED.get(kind, ()) if isinstance(kind, str) else ():
        if block.get(name) is None:
            raise PydanticCustomError("block", "block {n} has no {name}", {"n": n, "name": name})
    return block


Blocks = Annotated[list[Block], BeforeValidator(_as_blocks)]


class AnthropicMessage(Fields):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: Blocks


class AnthropicTool(ToolFields):
    """An entry of `tools`."""

    function_type = "custom"
    type: str = "custom"
    name: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check(self) -> AnthropicTool:
        if not self.is_left_out and (self.name is None or self.input_schema is None):
            raise ValueError("a tool needs name and input_schema")
        return self

    def to_chat(self) -> dict[str, Any]:
        """The function as in chat completions."""
        function = {"name": self.name, "description": self.description, "strict": self.strict}
        given = {name: value for name, value in function.items() if value is not None}
        return {"type": "function", "function": {**given, "parameters": self.input_schema}}


class OutputConfig(Fields):
    """`output_config`."""

    effort: str | None = None
    format: TextFormat | None = None


def _check_edit(value: Any) -> Any:
    if isinstance(value, dict) and str(value.get("type")).startswith("clear_thinking_"):
        return value
    raise PydanticCustomError("edit", "this server can only clear earlier thinking from a conversation")


class ContextManagement(Fields):
    """`context_management`. It can only clear earlier thinking, which is up to the chat template."""

    edits: list[Annotated[dict[str, Any], BeforeValidator(_check_edit)]] | None = None


class MessagesRequest(TextRequest, TemplateFields):
    """The body of /v1/messages, and of /v1/messages/count_tokens, which doesn't need max_tokens."""

    messages: list[AnthropicMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: TextContent | None = None
    tools: list[AnthropicTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: dict[str, Any] | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: TextFormat | None = None  # its earlier name for output_config.format
    context_management: ContextManagement | None = None


async def messages(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(request, MessagesRequest)
    if body.max_tokens is None:
        raise invalid("max_tokens is missing", "max_tokens", "missing_required_parameter")
    form = body.output_config.format or body.output_format or TextFormat()
    schema = body.schema_of_format(form, "output_config.format")
    return await respond(request, body, partial(_make_reply, body, schema, _conversation(body)))


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation, including those of the chat template."""
    body = await read_body(request, MessagesRequest)
    async with request.app.state.models.use(body.model) as model:
        return JSONResponse({"input_tokens": len(await _conversation(body).encode(model, count_only=True))})


def _conversation(body: MessagesRequest) -> Conversation:
    kwargs = body.template_kwargs(body.output_config.effort)
    return Conversation(_messages(body), kwargs, _tool_use(body))


def _messages(body: MessagesRequest) -> list[Message]:
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


def _tool_use(body: MessagesRequest) -> ToolUse:
    choice = body.tool_choice or {"type": "auto"}
    choices = {"auto": "auto", "any": "required", "none": "none", "tool": named_tool(choice.get("name"))}
    kind = choice.get("type")
    if not isinstance(kind, str) or kind not in choices:
        raise invalid(f"there is no tool_choice of this type (try: {', '.join(choices)})", "tool_choice.type")
    if kind == "tool":
        check_offered(choice.get("name"), body.tools)
    return ToolUse(functions_of(body.tools), choices[kind], not choice.get("disable_parallel_tool_use"))


async def _make_reply(
    body: MessagesRequest, schema: Schema, conversation: Conversation, model: ServedModel
) -> _Message:
    options = body.options(model.defaults, json_schema=schema)
    texts = await conversation.answers(model, options, body.eos_token_ids(model.eos_token_ids))
    return _Message(model, texts, body.stop or [])


class _Message(Reply):
    def __init__(self, model: ServedModel, texts: Sequence[Text], stops: Sequence[str]):
        super().__init__(model, texts)
        self._text, self._stops = texts[0], stops
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": model.name}

    def start(self) -> Iterator[Event]:
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": len(self._text.request.prompt), "output_tokens": 0}
        yield {"type": "message_start", "message": {**self._head, **empty, "usage": usage}}
        yield {"type": "ping"}

    def push(self, text: Text, pieces: Sequence[Piece]) -> Iterator[Event]:
        for piece in pieces:
            index = text.parts.index(piece.part)
            if piece.is_first:
                if index:
                    yield {"type": "content_block_stop", "index": index - 1}
                empty = Part(piece.part.kind, "", piece.part.call_id, piece.part.name)
                yield {"type": "content_block_start", "index": index, "content_block": _block(empty)}
            if piece.text:
                yield {"type": "content_block_delta", "index": index, "delta": _delta(piece)}
        if text.finish_reason is not None:
            yield {"type": "content_block_stop", "index": len(text.parts) - 1}

    def finish(self) -> Iterator[Event]:
        message = self.complete()
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": delta, "usage": message["usage"]}
        yield {"type": "message_stop"}

    def complete(self) -> dict[str, Any]:
        text, result = self._text, self._text.result
        assert result is not None and text.finish_reason is not None
        stop_sequence = _matched_stop(result, self._stops, self.model.lm.tokenizer)
        return {
            **self._head,
            "content": [_block(part) for part in text.parts],
            "stop_reason": _STOP_REASONS[text.finish_reason] if stop_sequence is None else "stop_sequence",
            "stop_sequence": stop_sequence,
            "usage": {
                "input_tokens": result.prompt_tokens - result.cached_tokens,
                "cache_read_input_tokens": result.cached_tokens,
                "cache_creation_input_tokens": 0,
                "output_tokens": len(result.tokens),
            },
        }


_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def _block(part: Part) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": part.text, "signature": ""}
    if part.kind == "call":
        return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": _parsed(part.text)}
    return {"type": "text", "text": part.text}


def _delta(piece: Piece) -> dict[str, Any]:
    if piece.part.kind == "call":
        return {"type": "input_json_delta", "partial_json": piece.text}
    kind = "thinking" if piece.part.kind == "reasoning" else "text"
    return {"type": f"{kind}_delta", kind: piece.text}


def _parsed(arguments: str) -> Any:
    """The arguments of a call; {} if they were cut off."""
    try:
        return json.loads(arguments)
    except ValueError:
        return {}


def _matched_stop(result: GenerationResult, stops: Sequence[str], tokenizer: Tokenizer) -> str | None:
    """The stop string that ended the text."""
    if result.finish_reason != "stop":
        return None
    for skip in (True, False):  # with tools, special tokens are part of the text
        whole = tokenizer.decode(result.tokens, skip_special_tokens=skip)
        if whole.startswith(result.text):
            behind = whole[len(result.text) :]
            return next((stop for stop in stops if behind.startswith(stop)), None)
    return None


ROUTES = routes("/messages", messages) + routes("/messages/count_tokens", count_tokens)
