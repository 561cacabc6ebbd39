"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxlm.generation import GenerationChunk, GenerationResult
from mlxlm.server.anthropic_schemas import CountTokensRequest, MessagesRequest, to_messages
from mlxlm.server.conversation import Answers, Conversation, Delta, answering, reasoning_kwargs
from mlxlm.server.errors import to_api_error
from mlxlm.server.events import data_event
from mlxlm.server.reply import FINISH_REASONS, Event, Reply, new_id, respond
from mlxlm.server.request_body import read_body
from mlxlm.server.state import ServerState
from mlxlm.server.tokens import MAX_COUNTED
from mlxlm.server.tool_use import ToolUse
from mlxlm.tokenizer import Tokenizer

_PATH = "/v1/messages"


async def messages(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(request, MessagesRequest)
    state: ServerState = request.app.state.server
    return await respond(request, _generate(state, body), body.stream)


async def count_tokens(request: Request) -> Response:
    """Count the tokens of a conversation, including those of the chat template."""
    body = await read_body(request, CountTokensRequest)
    state: ServerState = request.app.state.server
    async with state.models.use(body.model) as model:
        return JSONResponse({"input_tokens": len(await _conversation(body).encode(model, MAX_COUNTED))})


@asynccontextmanager
async def _generate(state: ServerState, body: MessagesRequest) -> AsyncIterator[Reply]:
    form, schema = body.output_config.format if body.output_config else None, body.json_schema
    if form is not None:
        schema = body.schema_of_format(form.type, form.json_schema, "output_config.format")
    limits: dict[str, Any] = {"max_tokens": body.max_tokens, "stop": body.stop_sequences or None}
    make_options = partial(body.options, json_schema=schema, **limits)
    async with answering(state, body.model, _conversation(body), make_options) as answers:
        yield _Message(answers, body.stop_sequences or [])


def _conversation(body: CountTokensRequest) -> Conversation:
    kwargs = reasoning_kwargs(body.output_config.effort if body.output_config else None)
    if body.thinking is not None and body.thinking.type != "adaptive":
        kwargs["enable_thinking"] = body.thinking.type == "enabled"
    tools = [tool.to_chat() for tool in body.tools or ()]
    return Conversation(to_messages(body), kwargs, ToolUse.from_anthropic(tools, body.tool_choice or {"type": "auto"}))


class _Message(Reply):
    def __init__(self, answers: Answers, stops: Sequence[str]):
        super().__init__(answers.texts)
        self._parser, self._stops, self._tokenizer = answers.parsers[0], stops, answers.model.lm.tokenizer
        self._head = {"id": new_id("msg_"), "type": "message", "role": "assistant", "model": answers.model.name}
        self._blocks: list[dict[str, Any]] = []
        self._kind: str | None = None  # of the unfinished block
        self._arguments = ""

    def start(self) -> Iterator[Event]:
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        usage = {"input_tokens": self.texts.prompt_tokens, "output_tokens": 0}
        yield {"type": "message_start", "message": {**self._head, **empty, "usage": usage}}
        yield {"type": "ping"}

    def push(self, _index: int, chunk: GenerationChunk) -> Iterator[Event]:
        for delta in self._parser.push(chunk):
            if delta.kind != self._kind or delta.call_id is not None:
                yield from self._stop_block()
                yield from self._start_block(delta)
            if delta.text:
                yield self._block_event("content_block_delta", delta=self._add(delta))
        if chunk.finish_reason is not None:
            if not self._blocks:
                yield from self._start_block(Delta("text", ""))
            yield from self._stop_block()

    def finish(self, results: Sequence[GenerationResult]) -> Iterator[Event]:
        message = self.complete(results)
        delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": delta, "usage": message["usage"]}
        yield {"type": "message_stop"}

    def complete(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        [result] = results
        stop_sequence = _matched_stop(result, self._stops, self._tokenizer)
        reason = "max_tokens" if FINISH_REASONS[result.finish_reason or "eos"] == "length" else "end_turn"
        if reason == "end_turn" and self._parser.has_calls:
            reason = "tool_use"
        return {
            **self._head,
            "content": self._blocks,
            "stop_reason": reason if stop_sequence is None else "stop_sequence",
            "stop_sequence": stop_sequence,
            "usage": {
                "input_tokens": result.prompt_tokens - result.cached_tokens,
                "cache_read_input_tokens": result.cached_tokens,
                "cache_creation_input_tokens": 0,
                "output_tokens": len(result.tokens),
            },
        }

    def encode(self, event: Event) -> bytes:
        return data_event(event, event["type"])

    def encode_error(self, error: Exception) -> bytes:
        return self.encode(to_api_error(error).body(_PATH))

    def _start_block(self, delta: Delta) -> Iterator[Event]:
        self._kind, self._arguments = delta.kind, ""
        block: dict[str, Any] = {"type": "text", "text": ""}
        if delta.kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif delta.kind == "call":
            block = {"type": "tool_use", "id": delta.call_id, "name": delta.name, "input": {}}
        self._blocks.append(block)
        yield self._block_event("content_block_start", content_block=dict(block))

    def _add(self, delta: Delta) -> dict[str, Any]:
        block = self._blocks[-1]
        if delta.kind == "call":
            self._arguments += delta.text
            return {"type": "input_json_delta", "partial_json": delta.text}
        kind = "thinking" if delta.kind == "reasoning" else "text"
        block[kind] += delta.text
        return {"type": f"{kind}_delta", kind: delta.text}

    def _stop_block(self) -> Iterator[Event]:
        if self._kind is None:
            return
        if self._kind == "call":
            self._blocks[-1]["input"] = _parsed(self._arguments)
        self._kind = None
        yield self._block_event("content_block_stop")

    def _block_event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": len(self._blocks) - 1, **fields}


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
