"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlxlm.generation import GenerationChunk, GenerationOptions, device_thread
from mlxlm.generation.logprobs import TokenLogprobs
from mlxlm.generation.prompt_logprobs import prompt_logprobs
from mlxlm.generation.stream_generate import encode_prompt
from mlxlm.server.conversation import check_constraint
from mlxlm.server.errors import invalid
from mlxlm.server.events import DONE, data_event, error_event, json_response, stream_response
from mlxlm.server.models import ServedModel
from mlxlm.server.request_body import read_body
from mlxlm.server.schemas import MAX_PROMPTS, CompletionRequest
from mlxlm.server.state import ServerState
from mlxlm.server.texts import Texts, generate, sample_requests
from mlxlm.server.token_logprobs import LogprobBuffer, completion_logprobs
from mlxlm.server.usage import FINISH_REASONS, new_id, usage
from mlxlm.tokenizer import Tokenizer

_MAX_TOKENS = 16  # OpenAI's default
_MAX_LOGPROBS = 20


async def completions(request: Request) -> Response:
    """Continue one prompt or several."""
    body = await read_body(request, CompletionRequest)
    state: ServerState = request.app.state.server
    if body.stream:
        return await stream_response(request, _stream(state, body))
    return await json_response(request, _complete(state, body))


async def _complete(state: ServerState, body: CompletionRequest) -> dict[str, Any]:
    async with _generate(state, body) as (texts, choices, head):
        async for item in texts.chunks():
            if item is not None:
                choices[item[0]].push(item[1])
        results = await texts.results()
    counted = usage(results, body.n)
    if body.max_tokens == 0:
        counted["prompt_tokens"] = counted["total_tokens"] = sum(choice.prompt_tokens for choice in choices[:: body.n])
    return {**head, "choices": [choice.whole() for choice in choices], "usage": counted}


async def _stream(state: ServerState, body: CompletionRequest) -> AsyncGenerator[bytes]:
    async with _generate(state, body) as (texts, choices, head):
        no_usage = {"usage": None} if body.include_usage else {}
        started = False
        try:
            async for item in texts.chunks():
                if not started:
                    started = True
                    for choice in choices:
                        if echoed := choice.echoed():
                            yield data_event({**head, "choices": [echoed], **no_usage})
                if item is None:
                    yield texts.progress()
                    continue
                for part in choices[item[0]].push(item[1]):
                    yield data_event({**head, "choices": [part], **no_usage})
            if body.include_usage:
                yield data_event({**head, "choices": [], "usage": usage(await texts.results(), body.n)})
            yield DONE
        except Exception as error:
            if not started:
                raise
            yield error_event(error)


@asynccontextmanager
async def _generate(
    state: ServerState, body: CompletionRequest
) -> AsyncIterator[tuple[Texts, list[_Choice], dict[str, Any]]]:
    """Start the texts; yields them with the choices they become, and the fields of the response and of each event."""
    _check(body)
    async with state.models.use(body.model) as model:
        options = _options(body, state.models.settings.defaults)
        await check_constraint(model, options)
        prompts = await asyncio.to_thread(_encode, model, body.prompt)
        requests = sample_requests(prompts, options, model.eos_token_ids, body.n) if body.max_tokens != 0 else []
        echoes = [await _echo(model, *both, body) for both in zip(body.prompt, prompts, strict=True)]
        tokenizer, logprobs = model.lm.tokenizer, body.logprobs is not None
        choices = [_Choice(n, echoes[n // body.n], tokenizer, logprobs) for n in range(len(prompts) * body.n)]
        head = {"id": new_id("cmpl-"), "object": "text_completion", "created": int(time.time()), "model": model.name}
        async with generate(model, requests, state.metrics) as texts:
            yield texts, choices, head


def _check(body: CompletionRequest) -> None:
    """Raise ApiError for what isn't supported."""
    if body.best_of not in (None, body.n):
        raise invalid("best_of isn't supported (try: n)", "best_of")
    if body.suffix:
        raise invalid("suffix isn't supported: the model only continues a text", "suffix")
    if body.max_tokens == 0 and (body.stream or not body.echo):
        raise invalid("max_tokens is 0 (try: 1, or echo without stream)", "max_tokens")
    if body.logprobs is not None and not 0 <= body.logprobs <= _MAX_LOGPROBS:
        raise invalid(f"logprobs is {body.logprobs} (try: 0 to {_MAX_LOGPROBS})", "logprobs")
    if len(body.prompt) * body.n > MAX_PROMPTS:
        raise invalid(f"prompts times n is more than {MAX_PROMPTS}", "n")


def _options(body: CompletionRequest, defaults: GenerationOptions) -> GenerationOptions:
    max_tokens = _MAX_TOKENS if body.max_tokens is None else body.max_tokens or 1
    return body.options(defaults, stop=body.stop, max_tokens=max_tokens, logprobs=body.logprobs)


def _encode(model: ServedModel, prompts: Sequence[str | list[int]]) -> list[Sequence[int]]:
    return [encode_prompt(model.lm, prompt) for prompt in prompts]


@dataclass(frozen=True)
class _Echo:
    """What a choice repeats of its prompt: nothing without `echo`."""

    text: str
    entries: Sequence[TokenLogprobs]
    prompt_tokens: int


async def _echo(model: ServedModel, prompt: str | list[int], ids: Sequence[int], body: CompletionRequest) -> _Echo:
    if not body.echo:
        return _Echo("", (), len(ids))
    text = prompt if isinstance(prompt, str) else model.lm.tokenizer.decode(prompt)
    if body.logprobs is None:
        return _Echo(text, (), len(ids))
    compute = partial(prompt_logprobs, model.lm, ids, body.logprobs)
    following = await asyncio.to_thread(device_thread.run, compute)
    first = TokenLogprobs(ids[0], math.nan, (), model.lm.tokenizer.token_bytes(ids[0]))
    return _Echo(text, (first, *following), len(ids))


class _Choice:
    """One of the texts: collects its pieces, and makes the choices of a response or of the events of a stream."""

    def __init__(self, index: int, echo: _Echo, tokenizer: Tokenizer, logprobs: bool):
        self.prompt_tokens = echo.prompt_tokens
        self._index, self._echo, self._tokenizer = index, echo, tokenizer
        self._logprobs = LogprobBuffer() if logprobs else None
        self._entries = list(echo.entries)
        self._texts = [echo.text]
        self._length = len(echo.text)  # characters whose log-probabilities were returned
        self._finish_reason = "length"

    def echoed(self) -> dict[str, Any] | None:
        """The choice of the event for the prompt, if it is part of the text."""
        if not self._echo.text:
            return None
        entries = list(self._echo.entries)
        return {**self._choice(self._echo.text), "logprobs": self._described(entries, 0) if entries else None}

    def push(self, chunk: GenerationChunk) -> list[dict[str, Any]]:
        """Add a chunk; return what it adds, as choices of events."""
        self._texts.append(chunk.text)
        parts = [self._choice(chunk.text)] if chunk.text else []
        if self._logprobs is not None:
            entries = self._logprobs.push(chunk.logprob, chunk.text, chunk.finish_reason)
            if entries:
                parts = parts or [self._choice("")]
                parts[-1]["logprobs"] = self._described(entries, self._length)
                self._length += sum(map(len, parts[-1]["logprobs"]["tokens"]))
            self._entries += entries
        if chunk.finish_reason is not None:
            self._finish_reason = FINISH_REASONS[chunk.finish_reason]
            parts.append({**self._choice(""), "finish_reason": self._finish_reason})
        return parts

    def whole(self) -> dict[str, Any]:
        """The choice of a response."""
        logprobs = None if self._logprobs is None else self._described(self._entries, 0)
        return {**self._choice("".join(self._texts)), "logprobs": logprobs, "finish_reason": self._finish_reason}

    def _choice(self, text: str) -> dict[str, Any]:
        return {"index": self._index, "text": text, "logprobs": None, "finish_reason": None}

    def _described(self, entries: list[TokenLogprobs], offset: int) -> dict[str, Any]:
        return completion_logprobs(entries, offset, self._tokenizer)
