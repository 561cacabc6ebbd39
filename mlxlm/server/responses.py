"""POST /v1/responses."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlxlm.generation import GenerationChunk, GenerationOptions, GenerationResult
from mlxlm.generation.logprobs import TokenLogprobs
from mlxlm.server.conversation import Answers, Conversation, Delta, answering, reasoning_kwargs
from mlxlm.server.errors import invalid, to_api_error
from mlxlm.server.events import data_event
from mlxlm.server.reply import FINISH_REASONS, Event, Reply, new_id, respond
from mlxlm.server.request_body import read_body
from mlxlm.server.response_items import OutputItems
from mlxlm.server.response_schemas import ResponseRequest, TextFormat, to_messages
from mlxlm.server.state import ServerState
from mlxlm.server.token_logprobs import LogprobBuffer
from mlxlm.server.tool_use import ToolUse


async def responses(request: Request) -> Response:
    """Answer the input."""
    body = await read_body(request, ResponseRequest)
    state: ServerState = request.app.state.server
    return await respond(request, _generate(state, body), body.stream)


@asynccontextmanager
async def _generate(state: ServerState, body: ResponseRequest) -> AsyncIterator[Reply]:
    if body.previous_response_id is not None:
        problem = "this server doesn't keep responses (try: the earlier items in input)"
        raise invalid(problem, "previous_response_id", "previous_response_not_found")
    effort = body.reasoning.effort if body.reasoning else None
    kwargs = reasoning_kwargs(effort, body.text.verbosity if body.text else None)
    tools = [tool.to_chat() for tool in body.tools or ()]
    tool_use = ToolUse.from_openai(tools, body.tool_choice, body.parallel_tool_calls)
    conversation = Conversation(to_messages(body), kwargs | (body.chat_template_kwargs or {}), tool_use)
    async with answering(state, body.model, conversation, partial(_options, body)) as answers:
        yield _Response(body, answers, _options(body, answers.model.defaults))


def _options(body: ResponseRequest, defaults: GenerationOptions) -> GenerationOptions:
    logprobs = (body.top_logprobs or 0) if body.wants_logprobs else None
    form = _format(body)
    schema = body.schema_of_format(form.type, form.json_schema, "text.format")
    return body.options(defaults, max_tokens=body.max_output_tokens, logprobs=logprobs, json_schema=schema)


def _format(body: ResponseRequest) -> TextFormat:
    return body.text.format if body.text and body.text.format else TextFormat(type="text")


class _Response(Reply):
    def __init__(self, body: ResponseRequest, answers: Answers, options: GenerationOptions):
        super().__init__(answers.texts)
        self._body, self._options, self._parser = body, options, answers.parsers[0]
        self._items = OutputItems(answers.model.lm.tokenizer)
        self._logprobs = LogprobBuffer() if body.wants_logprobs else None
        self._entries: list[TokenLogprobs] = []  # for the next piece of text
        self._sequence_number = 0
        self._head = {
            "id": new_id("resp_"),
            "object": "response",
            "created_at": int(time.time()),
            "model": answers.model.name,
        }

    def start(self) -> Iterator[Event]:
        for kind in ("response.created", "response.in_progress"):
            yield {"type": kind, "response": self._fields("in_progress")}

    def push(self, _index: int, chunk: GenerationChunk) -> Iterator[Event]:
        if self._logprobs is not None:
            self._entries += self._logprobs.push(chunk.logprob, chunk.text, chunk.finish_reason)
        for delta in self._parser.push(chunk):
            yield from self._items.push(delta, self._entries)
            if delta.text:
                self._entries = []  # a response has no log-probabilities of reasoning and calls
        if chunk.finish_reason is not None:
            if not self._items.items:
                yield from self._items.push(Delta("text", ""))  # an empty answer is one, too
            yield from self._items.finish(_status(chunk.finish_reason))

    def finish(self, results: Sequence[GenerationResult]) -> Iterator[Event]:
        response = self.complete(results)
        yield {"type": f"response.{response['status']}", "response": response}

    def complete(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        [result] = results
        assert result.finish_reason is not None
        status = _status(result.finish_reason)
        output_tokens = len(result.tokens)
        return {
            **self._fields(status),
            "output": self._items.items,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": {
                "input_tokens": result.prompt_tokens,
                "input_tokens_details": {"cached_tokens": result.cached_tokens},
                "output_tokens": output_tokens,
                "output_tokens_details": {"reasoning_tokens": self._parser.reasoning_tokens},
                "total_tokens": result.prompt_tokens + output_tokens,
            },
        }

    def encode(self, event: Event) -> bytes:
        self._sequence_number += 1
        return data_event({**event, "sequence_number": self._sequence_number - 1}, event["type"])

    def encode_error(self, error: Exception) -> bytes:
        failed = {"code": "server_error", "message": to_api_error(error).message}
        return self.encode({"type": "response.failed", "response": {**self._fields("failed"), "error": failed}})

    def _fields(self, status: str) -> dict[str, Any]:
        """The response without its output."""
        body, options = self._body, self._options
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "output": [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": False,
            "temperature": options.temperature,
            "text": {"format": _format(body).model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": body.tool_choice or "auto",
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_p": options.top_p,
            "truncation": "disabled",
            "usage": None,
        }


def _status(finish_reason: Any) -> str:
    return "incomplete" if FINISH_REASONS[finish_reason] == "length" else "completed"
