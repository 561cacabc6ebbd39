"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlxlm.generation import GenerationChunk, GenerationOptions, device_thread
from mlxlm.generation.logprobs import TokenLogprobs
from mlxlm.generation.request import encode_prompt
from mlxlm.generation.scoring import prompt_logprobs
from mlxlm.server.choices import ChoicesReply
from mlxlm.server.conversation import check_constraint
from mlxlm.server.errors import invalid
from mlxlm.server.models import ServedModel
from mlxlm.server.reply import FINISH_REASONS, Reply, new_id, respond
from mlxlm.server.request_body import read_body
from mlxlm.server.schemas import MAX_PROMPTS, CompletionRequest
from mlxlm.server.state import ServerState
from mlxlm.server.texts import generate, sample_requests
from mlxlm.server.token_logprobs import LogprobBuffer, completion_logprobs
from mlxlm.tokenizer import Tokenizer

_MAX_TOKENS = 16  # OpenAI's default
_MAX_LOGPROBS = 20


async def completions(request: Request) -> Response:
    """Continue one prompt or several."""
    body = await read_body(request, CompletionRequest)
    state: ServerState = request.app.state.server
    return await respond(request, _generate(state, body), body.stream)


@asynccontextmanager
async def _generate(state: ServerState, body: CompletionRequest) -> AsyncIterator[Reply]:
    _check(body)
    async with state.models.use(body.model) as model:
        options = _options(body, model.defaults)
        await check_constraint(model, options)
        prompts = [await model.encode(encode_prompt, model.lm, prompt) for prompt in body.prompt]
        requests = sample_requests(prompts, options, model.eos_token_ids, body.n) if body.max_tokens != 0 else []
        echoes = [await _echo(model, *both, body) for both in zip(body.prompt, prompts, strict=True)]
        tokenizer, logprobs = model.lm.tokenizer, body.logprobs is not None
        choices = [_Choice(n, echoes[n // body.n], tokenizer, logprobs) for n in range(len(prompts) * body.n)]
        async with generate(model, requests, state.metrics) as texts:
            head = {"id": new_id("cmpl-"), "object": "text_completion", "model": model.name}
            yield ChoicesReply(texts, choices, sum(map(len, prompts)), body, head)


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


_Echo = tuple[str, Sequence[TokenLogprobs]]  # what a choice repeats of its prompt: nothing without `echo`


async def _echo(model: ServedModel, prompt: str | list[int], ids: Sequence[int], body: CompletionRequest) -> _Echo:
    if not body.echo:
        return "", ()
    text = prompt if isinstance(prompt, str) else model.lm.tokenizer.decode(prompt)
    if body.logprobs is None:
        return text, ()
    compute = partial(prompt_logprobs, model.lm, ids, body.logprobs)
    following = await asyncio.to_thread(device_thread.run, compute)
    first = TokenLogprobs(ids[0], math.nan, (), model.lm.tokenizer.token_bytes(ids[0]))
    return text, (first, *following)


class _Choice:
    reasoning_tokens = 0

    def __init__(self, index: int, echo: _Echo, tokenizer: Tokenizer, logprobs: bool):
        text, entries = echo
        self._index, self._echo, self._tokenizer = index, echo, tokenizer
        self._logprobs = LogprobBuffer() if logprobs else None
        self._entries = list(entries)
        self._texts = [text]
        self._length = len(text)  # characters whose log-probabilities were returned
        self._finish_reason = "length"

    def start(self) -> dict[str, Any] | None:
        text, entries = self._echo
        return {**self._part(text), "logprobs": self._describe(entries, 0) if entries else None} if text else None

    def push(self, chunk: GenerationChunk) -> list[dict[str, Any]]:
        self._texts.append(chunk.text)
        parts = [self._part(chunk.text)] if chunk.text else []
        if self._logprobs is not None:
            entries = self._logprobs.push(chunk.logprob, chunk.text, chunk.finish_reason)
            if entries:
                parts = parts or [self._part("")]
                parts[-1]["logprobs"] = self._describe(entries, self._length)
                self._length += sum(map(len, parts[-1]["logprobs"]["tokens"]))
            self._entries += entries
        if chunk.finish_reason is not None:
            self._finish_reason = FINISH_REASONS[chunk.finish_reason]
            parts.append({**self._part(""), "finish_reason": self._finish_reason})
        return parts

    def complete(self) -> dict[str, Any]:
        logprobs = None if self._logprobs is None else self._describe(self._entries, 0)
        return {**self._part("".join(self._texts)), "logprobs": logprobs, "finish_reason": self._finish_reason}

    def _part(self, text: str) -> dict[str, Any]:
        return {"index": self._index, "text": text, "logprobs": None, "finish_reason": None}

    def _describe(self, entries: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
        return completion_logprobs(entries, offset, self._tokenizer)
