"""POST /v1/completions."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pydantic import model_validator
from starlette.requests import Request
from starlette.responses import Response

from mlxlm.chat.answer_parser import Piece
from mlxlm.generation import device_thread
from mlxlm.generation.request import encode_prompt
from mlxlm.generation.result import TokenLogprobs
from mlxlm.generation.scoring import prompt_logprobs
from mlxlm.server.endpoints import routes
from mlxlm.server.errors import invalid, new_id
from mlxlm.server.models import Models, ServedModel
from mlxlm.server.reply import ChoicesReply, json_response, respond
from mlxlm.server.request_body import read_body
from mlxlm.server.schemas import MAX_PROMPTS, ChoicesRequest, Prompts
from mlxlm.server.text import Text, finite, sample_requests, token_text
from mlxlm.tokenizer import FillInTheMiddle, Tokenizer
from mlxlm.utils.errors import GenerationError, TokenizerError

_MAX_TOKENS = 16  # OpenAI's default
_MAX_LOGPROBS = 20


class CompletionRequest(ChoicesRequest):
    """The body of /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _check(self) -> CompletionRequest:
        """Raise ApiError or GenerationError for what isn't supported."""
        if self.best_of not in (None, self.n):
            raise invalid("best_of isn't supported (try: n)", "best_of")
        if self.suffix and not all(isinstance(prompt, str) for prompt in self.prompt):
            raise invalid("with suffix, a prompt is a text", "prompt")
        if self.max_tokens == 0 and (self.stream or not self.echo):
            raise GenerationError("max_tokens is 0", "1, or echo without stream")
        if self.logprobs is not None and not 0 <= self.logprobs <= _MAX_LOGPROBS:
            raise invalid(f"logprobs is {self.logprobs} (try: 0 to {_MAX_LOGPROBS})", "logprobs")
        if len(self.prompt) * self.n > MAX_PROMPTS:
            raise invalid(f"prompts times n is more than {MAX_PROMPTS}", "n")
        return self


async def completions(request: Request) -> Response:
    """Continue one prompt or several."""
    body = await read_body(request, CompletionRequest)
    if body.max_tokens == 0:
        return await json_response(request, _echo_only(request.app.state.models, body))
    return await respond(request, body, partial(_make_reply, body))


async def _echo_only(models: Models, body: CompletionRequest) -> dict[str, Any]:
    async with models.use(body.model, body.keep_alive) as model:
        return (await _make_reply(body, model)).complete()


async def _make_reply(body: CompletionRequest, model: ServedModel) -> _Completion:
    max_tokens = _MAX_TOKENS if body.max_tokens is None else body.max_tokens or 1
    options = body.options(model.defaults, max_tokens=max_tokens, logprobs=body.logprobs)
    eos_token_ids = body.eos_token_ids(model.eos_token_ids)
    encode: Callable[..., Sequence[int]] = partial(encode_prompt, model.lm)
    if body.suffix:
        middle = fill_in_the_middle(model)
        eos_token_ids |= middle.end_token_ids
        encode = partial(middle.encode, suffix=body.suffix)
    prompts = [await model.encode(encode, prompt) for prompt in body.prompt]
    echoes = [await _echo(model, *both, body) for both in zip(body.prompt, prompts, strict=True)]
    requests = sample_requests(prompts, options, eos_token_ids, body.n)
    return _Completion(model, [Text(*numbered) for numbered in enumerate(requests)], body, echoes)


def fill_in_the_middle(model: ServedModel) -> FillInTheMiddle:
    """The prompts of a request with a suffix. Raises ApiError if the model has no tokens for them."""
    try:
        return FillInTheMiddle(model.lm.tokenizer)
    except TokenizerError as error:
        raise invalid(str(error), "suffix") from None


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


class _Completion(ChoicesReply):
    def __init__(self, model: ServedModel, texts: Sequence[Text], body: CompletionRequest, echoes: Sequence[_Echo]):
        super().__init__(model, texts, body, {"id": new_id("cmpl-"), "object": "text_completion"})
        self._echoes = [echoes[text.index // body.n] for text in texts]
        self._lengths = [len(text) for text, _ in self._echoes]  # characters whose log-probabilities were returned

    def start_choice(self, text: Text) -> dict[str, Any] | None:
        echo, entries = self._echoes[text.index]
        if not echo:
            return None
        logprobs = completion_logprobs(entries, 0, self.model.lm.tokenizer) if entries else None
        return {**self._choice(text, echo), "logprobs": logprobs}

    def choice(self, text: Text, piece: Piece | None) -> dict[str, Any]:
        return self._choice(text, piece.text if piece else "")

    def describe_logprobs(self, text: Text, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        described = completion_logprobs(entries, self._lengths[text.index], self.model.lm.tokenizer)
        self._lengths[text.index] += sum(map(len, described["tokens"]))
        return described

    def complete_choice(self, text: Text) -> dict[str, Any]:
        echo, entries = self._echoes[text.index]
        whole = self._choice(text, echo + "".join(part.text for part in text.parts))
        if text.request.options.logprobs is not None:
            whole["logprobs"] = completion_logprobs([*entries, *text.logprobs], 0, self.model.lm.tokenizer)
        return {**whole, "finish_reason": text.finish_reason or "length"}

    def _choice(self, text: Text, content: str) -> dict[str, Any]:
        return {"index": text.index, "text": content, "logprobs": None, "finish_reason": None}


def completion_logprobs(entries: Sequence[TokenLogprobs], offset: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """The `logprobs` of completions. `offset` is where the text of the entries starts, in characters.

    The log-probability of a text's first token, which nothing predicts, is NaN.
    """
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(token_text(entry, tokenizer)) if entry.bytes != b"" else 0  # special tokens have no text
    tops = [
        None
        if math.isnan(entry.logprob)
        else {token_text(top, tokenizer): finite(top.logprob) for top in entry.top_logprobs}
        for entry in entries
    ]
    return {
        "tokens": [token_text(entry, tokenizer) for entry in entries],
        "token_logprobs": [None if math.isnan(entry.logprob) else finite(entry.logprob) for entry in entries],
        "top_logprobs": tops,
        "text_offset": offsets,
    }


ROUTES = routes("/completions", completions)
