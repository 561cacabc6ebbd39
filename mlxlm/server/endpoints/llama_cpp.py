"""The endpoints of llama.cpp's server that editors use: POST /completion and /infill, GET /props and /slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from time import monotonic
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxlm.chat.answer_parser import Piece
from mlxlm.generation import FinishReason
from mlxlm.generation.request import encode_prompt
from mlxlm.generation.result import TokenLogprobs
from mlxlm.server.conversation import continuation
from mlxlm.server.endpoints import routes
from mlxlm.server.endpoints.completions import fill_in_the_middle
from mlxlm.server.models import Models, ServedModel
from mlxlm.server.reply import Event, Reply, respond, timings_of
from mlxlm.server.request_body import read_body
from mlxlm.server.schemas import MAX_PROMPTS, Fields, Prompt, TextRequest
from mlxlm.server.text import Text, describe_logprobs


class LlamaCppRequest(TextRequest):
    """The fields that /completion and /infill share.

    Attributes:
        response_fields: Names of the fields to return.
        return_tokens: Whether to return token ids.
        n_probs: How many of the most likely tokens to return at each position, with their log-probabilities.
        t_max_predict_ms: After so many milliseconds, the text ends if it has a line break; 0 for no limit.
    """

    response_fields: list[str] | None = Field(None, max_length=64)
    return_tokens: bool | None = None
    n_probs: int = Field(0, ge=0)
    t_max_predict_ms: float = Field(0, ge=0)


class LlamaCppCompletionRequest(LlamaCppRequest):
    """The body of /completion. Special tokens in the prompt are parsed: it is a template that the client has filled."""

    prompt: Prompt


class ExtraFile(Fields):
    """An entry of `input_extra`: a part of another file."""

    text: str
    filename: str = ""


class InfillRequest(LlamaCppRequest):
    """The body of /infill."""

    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: list[ExtraFile] = Field([], max_length=MAX_PROMPTS)
    prompt: str = ""


async def completion(request: Request) -> Response:
    """Continue a prompt."""
    body = await read_body(request, LlamaCppCompletionRequest)

    async def make_reply(model: ServedModel) -> _Completion:
        if isinstance(body.prompt, str) and body.prompt:
            ids = await model.encode(model.lm.tokenizer.encode, body.prompt, parse_special=True)
        else:
            ids = await model.encode(encode_prompt, model.lm, body.prompt)
        return await _make_reply(body, model, ids, body.eos_token_ids(model.eos_token_ids))

    return await respond(request, body, make_reply)


async def infill(request: Request) -> Response:
    """Fill in the middle between a prefix and a suffix."""
    body = await read_body(request, InfillRequest)

    async def make_reply(model: ServedModel) -> _Completion:
        middle = fill_in_the_middle(model)
        files = [(file.filename, file.text) for file in body.input_extra]
        ids = await model.encode(middle.encode, body.input_prefix, body.input_suffix, body.prompt, files)
        return await _make_reply(body, model, ids, body.eos_token_ids(model.eos_token_ids) | middle.end_token_ids)

    return await respond(request, body, make_reply)


async def _make_reply(
    body: LlamaCppRequest, model: ServedModel, prompt: Sequence[int], eos_token_ids: frozenset[int]
) -> _Completion:
    # Editors send n_predict: 0 to have the prompt in the cache. Then the first token is generated, but not returned.
    max_tokens = 1 if body.max_tokens == 0 else body.max_tokens
    options = body.options(model.defaults, max_tokens=max_tokens, logprobs=body.n_probs or None)
    return _Completion(model, continuation(model, prompt, options, eos_token_ids), body)


class _Completion(Reply):
    def __init__(self, model: ServedModel, text: Text, body: LlamaCppRequest):
        super().__init__(model, [text])
        self._text, self._body, self._first_time = text, body, 0.0

    def start(self) -> Sequence[Event]:
        return ()

    def push(self, text: Text, pieces: Sequence[Piece]) -> list[Event]:
        self._first_time = self._first_time or monotonic()
        limit, seconds = self._body.t_max_predict_ms / 1000, monotonic() - self._first_time
        if limit and seconds > limit and any("\n" in part.text for part in text.parts):
            text.stream.cancel()
        event = {"index": 0, "content": "".join(piece.text for piece in pieces), "tokens": [], "stop": False}
        if entries := text.take_logprobs():
            event["completion_probabilities"] = self._describe_logprobs(entries)
        return [event] if (event["content"] or entries) and self._returned else []

    def finish(self) -> list[Event]:
        return [self._select({**self._summary(), "content": ""})]

    def complete(self) -> dict[str, Any]:
        entries = self._text.logprobs if self._returned else ()
        more = {"completion_probabilities": self._describe_logprobs(entries)} if entries else {}
        return self._select({**self._summary(), **more})

    def _describe_logprobs(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        described = describe_logprobs(entries, self.model.lm.tokenizer)
        for entry, values in zip(entries, described, strict=True):
            ids = [entry.token, *(top.token for top in entry.top_logprobs)]
            for id, token in zip(ids, [values, *values["top_logprobs"]], strict=True):
                token["id"] = id
        return described

    def _summary(self) -> dict[str, Any]:
        result, options = self._text.result, self._text.request.options
        assert result is not None
        return {
            "index": 0,
            "content": result.text if self._returned else "",
            "tokens": result.tokens if self._body.return_tokens else [],
            "stop": True,
            "model": self.model.name,
            "generation_settings": {**asdict(options), "n_ctx": self.model.context_length},
            "stop_type": _STOP_TYPES[result.finish_reason or "length"],
            "truncated": result.finish_reason == "context",
            "has_new_line": "\n" in result.text,
            "tokens_predicted": len(result.tokens) if self._returned else 0,
            "tokens_evaluated": result.prompt_tokens,
            "tokens_cached": result.cached_tokens,
            "timings": timings_of(result),
        }

    def _select(self, values: dict[str, Any]) -> dict[str, Any]:
        """The fields of `response_fields`. timings/prompt_n is a field of an object, with this name in the response."""
        if self._body.response_fields is None:
            return values
        selected = {}
        for name in self._body.response_fields:
            value: Any = values
            for key in name.split("/"):
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                selected[name] = value
        return selected

    @property
    def _returned(self) -> bool:
        return self._body.max_tokens != 0


_STOP_TYPES: dict[FinishReason, str] = {
    "eos": "eos",
    "stop": "word",
    "length": "limit",
    "context": "limit",
    "constraint": "limit",
}


async def props(request: Request) -> JSONResponse:
    """Describe the model `?model=NAME`, or the default one, and the defaults of its options."""
    models: Models = request.app.state.models
    description = await models.describe(request.query_params.get("model"), with_tokenizer=True)
    model = models.get_loaded(description.name)
    return JSONResponse(
        {
            "default_generation_settings": {
                "n_ctx": description.context_length,
                "params": asdict(model.defaults) if model else {},
            },
            "total_slots": models.settings.batch_size,
            "model_alias": description.name,
            "model_path": description.name,
            "chat_template": description.chat_template or "",
            "modalities": {"vision": False, "audio": False},
            "build_info": f"mlxlm {version('mlxlm')}",
            "is_sleeping": model is None,
        }
    )


async def slots(request: Request) -> JSONResponse:
    """List the texts that can be generated at once with the models that are in memory, and which are."""
    models: Models = request.app.state.models
    running = [(model, n) for model in models.loaded for n in range(model.settings.batch_size)]
    return JSONResponse(
        [
            {"id": id, "n_ctx": model.context_length, "is_processing": n < model.engine.stats.running}
            for id, (model, n) in enumerate(running)
        ]
    )


ROUTES = [
    *routes("/completion", completion),
    *routes("/infill", infill),
    Route("/props", props),
    Route("/slots", slots),
]
