"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlxlm.chat.messages import Message, ToolCall
from mlxlm.generation import GenerationChunk, GenerationOptions
from mlxlm.generation.logprobs import TokenLogprobs
from mlxlm.server.choices import ChoicesReply
from mlxlm.server.conversation import AnswerParser, Conversation, Delta, answering, reasoning_kwargs
from mlxlm.server.errors import invalid
from mlxlm.server.reply import FINISH_REASONS, Reply, new_id, respond
from mlxlm.server.request_body import read_body
from mlxlm.server.schemas import ChatCompletionRequest, ChatMessage, ResponseFormat
from mlxlm.server.state import ServerState
from mlxlm.server.token_logprobs import LogprobBuffer, chat_logprobs
from mlxlm.server.tool_use import ToolUse
from mlxlm.tokenizer import Tokenizer


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    body = await read_body(request, ChatCompletionRequest)
    state: ServerState = request.app.state.server
    return await respond(request, _generate(state, body), body.stream)


@asynccontextmanager
async def _generate(state: ServerState, body: ChatCompletionRequest) -> AsyncIterator[Reply]:
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    tool_use = ToolUse.from_openai(tools, body.tool_choice, body.parallel_tool_calls)
    conversation = Conversation([to_message(m) for m in body.messages], _template_kwargs(body), tool_use)
    async with answering(state, body.model, conversation, partial(_options, body), body.n) as answers:
        tokenizer = answers.model.lm.tokenizer
        choices = [_Choice(n, parser, tokenizer, bool(body.logprobs)) for n, parser in enumerate(answers.parsers)]
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        head = {"id": new_id("chatcmpl-"), "object": kind, "model": answers.model.name}
        yield ChoicesReply(answers.texts, choices, answers.texts.prompt_tokens // body.n, body, head)


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
    form = body.response_format or ResponseFormat(type="text")
    schema = form.json_schema.json_schema if form.json_schema else None
    return body.options(
        defaults,
        stop=body.stop,
        max_tokens=limits.pop() if limits else None,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        json_schema=body.schema_of_format(form.type, schema, "response_format"),
    )


def _template_kwargs(body: ChatCompletionRequest) -> dict[str, Any]:
    return reasoning_kwargs(body.reasoning_effort, body.verbosity) | (body.chat_template_kwargs or {})


class _Choice:
    reasoning_tokens = 0

    def __init__(self, index: int, parser: AnswerParser, tokenizer: Tokenizer, logprobs: bool):
        self._index, self._parser, self._tokenizer = index, parser, tokenizer
        self._logprobs = LogprobBuffer() if logprobs else None
        self._entries: list[TokenLogprobs] = []
        self._texts: dict[str, list[str]] = {"content": [], "reasoning_content": []}
        self._calls: list[dict[str, Any]] = []
        self._finish_reason: str | None = None

    def start(self) -> dict[str, Any]:
        return self._part({"role": "assistant", "content": ""})

    def push(self, chunk: GenerationChunk) -> list[dict[str, Any]]:
        parts = [self._part(self._add(delta)) for delta in self._parser.push(chunk)]
        self.reasoning_tokens = self._parser.reasoning_tokens
        if self._logprobs is not None:
            entries = self._logprobs.push(chunk.logprob, chunk.text, chunk.finish_reason)
            self._entries += entries
            if entries:
                parts = parts or [self._part({})]
                parts[-1]["logprobs"] = chat_logprobs(entries, self._tokenizer)
        if chunk.finish_reason is not None:
            self._finish_reason = FINISH_REASONS[chunk.finish_reason]
            if self._parser.has_calls and self._finish_reason == "stop":
                self._finish_reason = "tool_calls"
            parts.append({**self._part({}), "finish_reason": self._finish_reason})
        return parts

    def complete(self) -> dict[str, Any]:
        content = "".join(self._texts["content"])
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._calls:
            message |= {"content": content or None, "tool_calls": self._calls}
        if reasoning := "".join(self._texts["reasoning_content"]):
            message["reasoning_content"] = reasoning
        logprobs = None if self._logprobs is None else chat_logprobs(self._entries, self._tokenizer)
        return {"index": self._index, "message": message, "logprobs": logprobs, "finish_reason": self._finish_reason}

    def _part(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _add(self, delta: Delta) -> dict[str, Any]:
        """Add a piece of the answer; return it in OpenAI's form."""
        if delta.kind == "call":
            return {"tool_calls": [self._add_to_call(delta)]}
        name = "reasoning_content" if delta.kind == "reasoning" else "content"
        self._texts[name].append(delta.text)
        return {name: delta.text}

    def _add_to_call(self, delta: Delta) -> dict[str, Any]:
        if delta.call_id is None:
            self._calls[-1]["function"]["arguments"] += delta.text
            return {"index": len(self._calls) - 1, "function": {"arguments": delta.text}}
        function = {"name": delta.name, "arguments": delta.text}
        self._calls.append({"id": delta.call_id, "type": "function", "function": function})
        return {"index": len(self._calls) - 1, "id": delta.call_id, "type": "function", "function": dict(function)}
