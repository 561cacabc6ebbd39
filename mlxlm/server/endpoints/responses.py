"""POST /v1/responses: OpenAI's Responses API."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxlm.chat.answer_parser import Part, Piece
from mlxlm.chat.messages import Message, ToolCall
from mlxlm.generation.result import TokenLogprobs
from mlxlm.server.conversation import Conversation, ToolFields, ToolUse
from mlxlm.server.endpoints import routes
from mlxlm.server.errors import ApiError, invalid, new_id
from mlxlm.server.models import ServedModel
from mlxlm.server.reply import Event, Reply, respond
from mlxlm.server.request_body import read_body
from mlxlm.server.schemas import (
    MAX_MESSAGES,
    MAX_TOOLS,
    Fields,
    JsonText,
    StreamOptions,
    TemplateFields,
    TextContent,
    TextFormat,
    TextRequest,
    join_text_parts,
)
from mlxlm.server.stored_responses import StoredResponses
from mlxlm.server.text import Text, describe_logprobs

_LOGPROBS = "message.output_text.logprobs"  # the only `include` that has an effect


def _as_output(value: Any) -> Any:
    """The result of a call as text: that of its parts, or else JSON."""
    parts = value if isinstance(value, list) else [value]
    if isinstance(value, str) or all(isinstance(part, dict) and "type" in part for part in parts):
        return join_text_parts([value] if isinstance(value, dict) else value)
    return json.dumps(value, ensure_ascii=False)


class InputItem(Fields):
    """An item of the input. Its type decides which fields it needs.

    Calls and outputs of tools that the client runs, such as `custom_tool_call` and `local_shell_call_output`, are like
    those of functions; their arguments are in `input`, `action` or `operation`.
    """

    type: str = "message"
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: TextContent | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: JsonText | None = None
    input: str | None = None
    action: dict[str, Any] | None = None
    operation: dict[str, Any] | None = None
    output: Annotated[str, BeforeValidator(_as_output)] | None = None
    summary: TextContent | None = None

    @property
    def is_call(self) -> bool:
        """Whether it is a call of a tool that the client runs."""
        return self.type == "function_call" or self.type.endswith("_call") and self.call_id is not None

    @property
    def is_output(self) -> bool:
        """Whether it is the result of such a call."""
        return self.type == "function_call_output" or self.type.endswith("_output") and self.output is not None

    @property
    def is_left_out(self) -> bool:
        """Whether it is of a type without text, such as `web_search_call`."""
        return not (self.type in ("message", "reasoning", "item_reference") or self.is_call or self.is_output)


def _as_items(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class TextSettings(Fields):
    """`text`."""

    format: TextFormat = TextFormat()
    verbosity: str | None = None


class ResponseTool(ToolFields):
    """An entry of `tools`."""

    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def to_chat(self) -> dict[str, Any]:
        """The function as in chat completions."""
        function = self.model_dump(include={"name", "description", "parameters", "strict"}, exclude_none=True)
        return {"type": "function", "function": function}


class ResponseRequest(TextRequest, TemplateFields):
    """The body of /v1/responses."""

    metadata: dict[str, Any] | None = None
    input: Annotated[list[InputItem], BeforeValidator(_as_items), Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    stream_options: StreamOptions | None = None
    text: TextSettings = TextSettings()
    tools: list[ResponseTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: list[str] | None = None
    truncation: Literal["disabled", "auto"] | None = None
    store: bool | None = None
    previous_response_id: str | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether the request asks for log-probabilities."""
        return self.top_logprobs is not None or _LOGPROBS in (self.include or ())


async def responses(request: Request) -> Response:
    """Answer the input."""
    body = await read_body(request, ResponseRequest)
    stored: StoredResponses = request.app.state.stored_responses
    if body.previous_response_id is not None:
        earlier = stored.get(body.previous_response_id, "previous_response_id")
        items = [*earlier["input"], *earlier["response"]["output"]]
        body.input = [*map(InputItem.model_validate, items), *body.input]
    for index, item in enumerate(body.input):
        if item.type == "item_reference":
            found = stored.find_item(item.id or "")
            if found is None:
                raise invalid(f"there is no item {(item.id or '')[:100]!r} (try: the item itself)", f"input.{index}.id")
            body.input[index] = InputItem.model_validate(found)
    tool_use = ToolUse.from_openai(body.tools, body.tool_choice, body.parallel_tool_calls)
    kwargs = body.template_kwargs(verbosity=body.text.verbosity)
    if not (messages := _messages(body)):
        raise invalid("input has no message, call or output", "input")
    conversation = Conversation(messages, kwargs, tool_use)
    keep = None if body.store is False else stored
    return await respond(request, body, partial(_make_reply, body, conversation, keep))


async def get_response(request: Request) -> JSONResponse:
    """Return a response that was kept."""
    stored: StoredResponses = request.app.state.stored_responses
    return JSONResponse(stored.get(request.path_params["id"])["response"])


async def delete_response(request: Request) -> JSONResponse:
    """Delete a response that was kept."""
    id = request.path_params["id"]
    request.app.state.stored_responses.delete(id)
    return JSONResponse({"id": id, "object": "response", "deleted": True})


async def list_input_items(request: Request) -> JSONResponse:
    """Return the input of a response that was kept, the last item first unless the query says `order=asc`."""
    stored: StoredResponses = request.app.state.stored_responses
    items = [_listed(item) for item in stored.get(request.path_params["id"])["input"]]
    items = items if request.query_params.get("order") == "asc" else items[::-1]
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {}
    return JSONResponse({"object": "list", "data": items, "has_more": False, **ends})


def _listed(item: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(item.get("content"), str):
        return item
    kind = "reasoning" if item["type"] == "reasoning" else "output" if item["role"] == "assistant" else "input"
    return {**item, "content": [{"type": f"{kind}_text", "text": item["content"]}]}


def _messages(body: ResponseRequest) -> list[Message]:
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
        elif item.is_output:
            call_id = item.call_id or item.id
            if call_id is None or item.output is None:
                raise invalid("an output needs call_id and output", where)
            messages.append(Message("tool", item.output, tool_call_id=call_id))
        elif item.is_call:
            _add_call(messages, item, reasoning, where)
            reasoning = None
        elif item.type == "message":
            if item.role is None or item.content is None:
                raise invalid("a message needs role and content", where)
            kept = reasoning if item.role == "assistant" else None
            messages.append(Message(item.role, item.content, reasoning_content=kept))
            reasoning = None
    return messages


def _add_call(messages: list[Message], item: InputItem, reasoning: str | None, where: str) -> None:
    """Add a call to the answer that it belongs to."""
    arguments, name = item.arguments, item.name
    if item.type != "function_call":
        value = {"input": item.input} if item.input is not None else item.action or item.operation or {}
        arguments, name = arguments or json.dumps(value, ensure_ascii=False), name or item.type.removesuffix("_call")
    if item.call_id is None or name is None or arguments is None:
        raise invalid("a call needs call_id, name and arguments", where)
    call = ToolCall(item.call_id, name, arguments)
    last = messages[-1] if messages and messages[-1].role == "assistant" else None
    if last is None:
        messages.append(Message("assistant", "", tool_calls=(call,), reasoning_content=reasoning))
    else:
        kept = last.reasoning_content or reasoning
        messages[-1] = Message("assistant", last.content, tool_calls=(*last.tool_calls, call), reasoning_content=kept)


async def _make_reply(
    body: ResponseRequest, conversation: Conversation, stored: StoredResponses | None, model: ServedModel
) -> _Response:
    schema = body.schema_of_format(body.text.format, "text.format")
    logprobs = (body.top_logprobs or 0) if body.wants_logprobs else None
    options = body.options(model.defaults, logprobs=logprobs, json_schema=schema)
    if body.truncation == "auto":
        conversation = await conversation.truncate(model, options.max_tokens or 1)
    texts = await conversation.answers(model, options, body.eos_token_ids(model.eos_token_ids))
    return _Response(model, texts, body, stored)


class _Response(Reply):
    """A response, whose output has an item for each part of the text: reasoning, a message, or a tool call."""

    def __init__(
        self, model: ServedModel, texts: Sequence[Text], body: ResponseRequest, stored: StoredResponses | None = None
    ):
        super().__init__(model, texts)
        self._body, self._text, self._stored = body, texts[0], stored
        self._items: list[dict[str, Any]] = []  # the last one is unfinished until the text has ended
        self._sequence_number = 0
        self._head = {"id": new_id("resp_"), "object": "response", "created_at": int(time.time()), "model": model.name}

    def start(self) -> Iterator[Event]:
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": self._fields("in_progress")}

    def push(self, text: Text, pieces: Sequence[Piece]) -> Iterator[Event]:
        for piece in pieces:
            if piece.is_first:
                if self._items:
                    yield from self._finish_item("completed")
                yield from self._start_item(piece.part)
            if piece.text:
                # A response has no log-probabilities of reasoning and calls.
                yield self._extend_item(piece.text, text.take_logprobs())
        if text.finish_reason is not None:
            yield from self._finish_item(self._status)

    def finish(self) -> Iterator[Event]:
        response = self.complete()
        yield {"type": f"response.{response['status']}", "response": response}

    def complete(self) -> dict[str, Any]:
        text, result = self._text, self._text.result
        assert result is not None
        output_tokens = len(result.tokens)
        response = {
            **self._fields(self._status),
            "output": self._items,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "usage": {
                "input_tokens": result.prompt_tokens,
                "input_tokens_details": {"cached_tokens": result.cached_tokens},
                "output_tokens": output_tokens,
                "output_tokens_details": {"reasoning_tokens": text.reasoning_tokens},
                "total_tokens": result.prompt_tokens + output_tokens,
            },
        }
        if self._stored is not None:
            items = [item.model_dump(exclude_none=True) for item in self._body.input]
            self._stored.put(response, [{"id": new_id("msg_"), **item} for item in items])
        return response

    def encode(self, event: Event) -> bytes:
        self._sequence_number += 1
        return super().encode({**event, "sequence_number": self._sequence_number - 1})

    def fail(self, error: ApiError, path: str) -> Event:
        failed = {"code": "server_error", "message": error.message}
        return {"type": "response.failed", "response": {**self._fields("failed"), "error": failed}}

    @property
    def _status(self) -> str:
        return "incomplete" if self._text.finish_reason == "length" else "completed"

    def _start_item(self, part: Part) -> Iterator[Event]:
        self._items.append(_new_item(part))
        yield self._item_event("response.output_item.added")
        if part.kind != "call":
            extra: dict[str, Any] = {"annotations": [], "logprobs": []} if part.kind == "text" else {}
            content = {"type": _CONTENT_TYPES[part.kind], "text": "", **extra}
            self._items[-1]["content"] = [content]
            yield self._event("response.content_part.added", content_index=0, part=content)

    def _extend_item(self, text: str, entries: Sequence[TokenLogprobs]) -> Event:
        item = self._items[-1]
        if item["type"] == "function_call":
            item["arguments"] += text
            return self._event("response.function_call_arguments.delta", delta=text)
        [content] = item["content"]
        content["text"] += text
        event = self._event(f"response.{content['type']}.delta", content_index=0, delta=text)
        if item["type"] == "message":
            event["logprobs"] = describe_logprobs(entries, self.model.lm.tokenizer)
            content["logprobs"] += event["logprobs"]
        return event

    def _finish_item(self, status: str) -> Iterator[Event]:
        item = self._items[-1]
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("response.function_call_arguments.done", **done)
        else:
            [content] = item["content"]
            extra = {"logprobs": content["logprobs"]} if item["type"] == "message" else {}
            yield self._event(f"response.{content['type']}.done", content_index=0, text=content["text"], **extra)
            yield self._event("response.content_part.done", content_index=0, part=content)
        item["status"] = status
        yield self._item_event("response.output_item.done")

    def _item_event(self, kind: str) -> Event:
        return {"type": kind, "output_index": len(self._items) - 1, "item": self._items[-1]}

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "item_id": self._items[-1]["id"], "output_index": len(self._items) - 1, **fields}

    def _fields(self, status: str) -> dict[str, Any]:
        """The response without its output."""
        body, options = self._body, self._text.request.options
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_tokens,
            "metadata": body.metadata or {},
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": self._stored is not None,
            "temperature": options.temperature,
            "text": {"format": body.text.format.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": options.top_p,
            "truncation": body.truncation or "disabled",
            "usage": None,
        }


_CONTENT_TYPES = {"reasoning": "reasoning_text", "text": "output_text"}


def _new_item(part: Part) -> dict[str, Any]:
    if part.kind == "call":
        item = {"id": new_id("fc_"), "type": "function_call", "call_id": part.call_id, "name": part.name}
        return {**item, "arguments": "", "status": "in_progress"}
    if part.kind == "reasoning":
        return {"id": new_id("rs_"), "type": "reasoning", "summary": [], "content": [], "status": "in_progress"}
    return {"id": new_id("msg_"), "type": "message", "role": "assistant", "content": [], "status": "in_progress"}


ROUTES = [
    *routes("/responses", responses),
    *routes("/responses/{id}", get_response, "GET"),
    *routes("/responses/{id}", delete_response, "DELETE"),
    *routes("/responses/{id}/input_items", list_input_items, "GET"),
]
