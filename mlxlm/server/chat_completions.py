"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlxlm.chat.messages import Message, ToolCall
from mlxlm.generation import GenerationChunk, GenerationOptions, GenerationResult
from mlxlm.generation.logprobs import TokenLogprobs
from mlxlm.server.conversation import AnswerParser, Conversation, Delta, answering, reasoning_kwargs
from mlxlm.server.errors import invalid
from mlxlm.server.events import DONE, data_event, error_event, json_response, stream_response
from mlxlm.server.request_body import read_body
from mlxlm.server.schemas import ChatCompletionRequest, ChatMessage
from mlxlm.server.state import ServerState
from mlxlm.server.texts import Texts
from mlxlm.server.token_logprobs import LogprobBuffer, chat_logprobs
from mlxlm.server.tool_use import ToolUse
from mlxlm.server.usage import FINISH_REASONS, new_id, usage
from mlxlm.tokenizer import Tokenizer


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(request, ChatCompletionRequest)
    state: ServerState = request.app.state.server
    if body.stream:
        return await stream_response(request, _stream(state, body))
    return await json_response(request, _complete(state, body))


async def _complete(state: ServerState, body: ChatCompletionRequest) -> dict[str, Any]:
    async with _generate(state, body) as (texts, choices, head):
        async for item in texts.chunks():
            if item is not None:
                choices[item[0]].push(item[1])
        results = await texts.results()
    messages = [choice.as_message() for choice in choices]
    return {**head, "object": "chat.completion", "choices": messages, "usage": _usage(results, choices)}


async def _stream(state: ServerState, body: ChatCompletionRequest) -> AsyncGenerator[bytes]:
    async with _generate(state, body) as (texts, choices, head):
        head = {**head, "object": "chat.completion.chunk"}
        no_usage = {"usage": None} if body.include_usage else {}

        def event(choice: dict[str, Any]) -> bytes:
            return data_event({**head, "choices": [choice], **no_usage})

        started = False
        try:
            async for item in texts.chunks():
                if not started:
                    started = True
                    for choice in choices:
                        yield event(choice.as_delta({"role": "assistant", "content": ""}))
                if item is None:
                    yield texts.progress()
                    continue
                for part in choices[item[0]].push(item[1]):
                    yield event(part)
            if body.include_usage:
                yield data_event({**head, "choices": [], "usage": _usage(await texts.results(), choices)})
            yield DONE
        except Exception as error:
            if not started:
                raise
            yield error_event(error)


@asynccontextmanager
async def _generate(
    state: ServerState, body: ChatCompletionRequest
) -> AsyncIterator[tuple[Texts, list[_Choice], dict[str, Any]]]:
    """Start the answers; yields them with the choices they become, and the fields of the response or each event."""
    options = _options(body, state.models.settings.defaults)
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    tool_use = ToolUse.of(tools, body.tool_choice, body.parallel_tool_calls)
    conversation = Conversation([to_message(m) for m in body.messages], _template_kwargs(body), tool_use)
    async with answering(state, body.model, conversation, options, body.n) as answers:
        tokenizer = answers.model.lm.tokenizer
        choices = [_Choice(n, parser, tokenizer, bool(body.logprobs)) for n, parser in enumerate(answers.parsers)]
        head = {"id": new_id("chatcmpl-"), "created": int(time.time()), "model": answers.model.name}
        yield answers.texts, choices, head


def _usage(results: list[GenerationResult], choices: list[_Choice]) -> dict[str, Any]:
    return usage(results, len(choices), sum(choice.reasoning_tokens for choice in choices))


def to_message(message: ChatMessage) -> Message:
    """The message for the chat template."""
    calls = [ToolCall(c.id or "", c.function.name, c.function.arguments) for c in message.tool_calls or ()]
    return Message(
        message.role,
        message.content or message.refusal or "",
        tool_calls=tuple(calls),
        tool_call_id=message.tool_call_id,
        name=message.name,
        reasoning_content=message.reasoning_content,
    )


def _options(body: ChatCompletionRequest, defaults: GenerationOptions) -> GenerationOptions:
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise invalid("max_tokens and max_completion_tokens differ (try: one of them)", "max_completion_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs needs logprobs: true", "top_logprobs")
    return body.options(
        defaults,
        stop=body.stop,
        max_tokens=limits.pop() if limits else None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        json_schema=_response_schema(body),
    )


def _response_schema(body: ChatCompletionRequest) -> dict[str, Any] | bool | str | None:
    """The JSON schema that the answer must match, if any."""
    form = body.response_format
    if form is None or form.type == "text":
        return body.json_schema
    if any(value is not None for value in (body.json_schema, body.regex, body.choice, body.grammar)):
        raise invalid("response_format and another constraint (try: one of them)", "response_format")
    if form.type == "json_object":
        return {"type": "object"}
    if form.json_schema is None or form.json_schema.json_schema is None:
        raise invalid("response_format has no schema", "response_format.json_schema.schema")
    return form.json_schema.json_schema


def _template_kwargs(body: ChatCompletionRequest) -> dict[str, Any]:
    return reasoning_kwargs(body.reasoning_effort, body.verbosity) | (body.chat_template_kwargs or {})


class _Choice:
    """One of the answers: collects its pieces, and makes the choices of a response or of the events of a stream."""

    def __init__(self, index: int, parser: AnswerParser, tokenizer: Tokenizer, logprobs: bool):
        self._index, self._parser, self._tokenizer = index, parser, tokenizer
        self._logprobs = LogprobBuffer() if logprobs else None
        self._entries: list[TokenLogprobs] = []
        self._texts: dict[str, list[str]] = {"content": [], "reasoning_content": []}
        self._calls: list[dict[str, Any]] = []
        self._finish_reason: str | None = None

    @property
    def reasoning_tokens(self) -> int:
        """How many of its tokens were reasoning."""
        return self._parser.reasoning_tokens

    def push(self, chunk: GenerationChunk) -> list[dict[str, Any]]:
        """Add a chunk; return what it adds, as choices of events."""
        parts = self._parser.push(chunk)
        deltas = [self._as_delta(part) for part in parts]
        if self._logprobs is not None:
            entries = self._logprobs.push(chunk.logprob, chunk.text, chunk.finish_reason)
            self._entries += entries
            if entries:
                deltas = deltas or [self.as_delta({})]
                deltas[-1]["logprobs"] = chat_logprobs(entries, self._tokenizer)
        if chunk.finish_reason is not None:
            self._finish_reason = FINISH_REASONS[chunk.finish_reason]
            if self._parser.has_calls and self._finish_reason == "stop":
                self._finish_reason = "tool_calls"
            deltas.append({**self.as_delta({}), "finish_reason": self._finish_reason})
        return deltas

    def as_delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        """A choice of an event."""
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def as_message(self) -> dict[str, Any]:
        """The choice of a response."""
        content = "".join(self._texts["content"])
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._calls:
            message |= {"content": content or None, "tool_calls": self._calls}
        if reasoning := "".join(self._texts["reasoning_content"]):
            message["reasoning_content"] = reasoning
        logprobs = None if self._logprobs is None else chat_logprobs(self._entries, self._tokenizer)
        return {"index": self._index, "message": message, "logprobs": logprobs, "finish_reason": self._finish_reason}

    def _as_delta(self, part: Delta) -> dict[str, Any]:
        if part.kind == "call":
            return self.as_delta({"tool_calls": [self._add_to_call(part)]})
        name = "reasoning_content" if part.kind == "reasoning" else "content"
        self._texts[name].append(part.text)
        return self.as_delta({name: part.text})

    def _add_to_call(self, part: Delta) -> dict[str, Any]:
        """Add a piece to the calls; return the delta of its call."""
        if part.call_id is None:
            self._calls[-1]["function"]["arguments"] += part.text
            return {"index": len(self._calls) - 1, "function": {"arguments": part.text}}
        function = {"name": part.name, "arguments": part.text}
        self._calls.append({"id": part.call_id, "type": "function", "function": function})
        return {"index": len(self._calls) - 1, "id": part.call_id, "type": "function", "function": dict(function)}
