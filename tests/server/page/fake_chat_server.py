"""A server with the chat page and canned answers in the form of the real API, on a port of this machine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from mlxlm.server.app import page_routes
from mlxlm.server.endpoints.files import extract_text
from mlxlm.server.errors import ErrorMiddleware


@dataclass
class Answer:
    """What the server streams.

    Attributes:
        text: The pieces of the answer. At None, the server waits for `FakeChatServer.go_on`.
        reasoning: Pieces that come before.
        prompt_tokens: How many tokens the prompt "has": reading half of it is reported first.
        finish_reason: As in OpenAI's API.
        error: The message of an error, at once with `status`, or with status 200 at the end of the stream.
        lost: The connection ends before the answer does.
        logprobs: Entries of `logprobs.content` of each piece of the text.
    """

    text: Sequence[str | None] = ("Fine.",)
    reasoning: Sequence[str] = ()
    prompt_tokens: int = 0
    finish_reason: str = "stop"
    error: str = ""
    status: int = 200
    lost: bool = False
    logprobs: Sequence[list[dict[str, Any]]] = ()


@dataclass
class FakeChatServer:
    """Answers each request with the next of `answers`, and keeps the bodies of the requests.

    Attributes:
        answers: For requests to /v1/chat/completions; then "Fine.".
        models: Their names. The first is loaded.
        example: The example prompt of all models.
        api_key: That requests need.
        requests: Bodies of requests to /v1/chat/completions.
        other_requests: Paths and bodies of other requests.
        loaded: Names of the models that are loaded.
        pull: What a download reports. Before each but the first report it waits, as at None in an answer. Without it,
            the catalog is empty.
        url: Of the server.
        goes_on: See `Answer.text`.
    """

    answers: list[Answer] = field(default_factory=list)
    models: list[str] = field(default_factory=lambda: ["tiny-model"])
    example: str | None = None
    api_key: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    other_requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    pull: list[dict[str, Any]] = field(default_factory=list)
    loaded: set[str] = field(default_factory=set)
    url: str = ""
    goes_on: bool = False

    def app(self) -> Starlette:
        self.loaded = set(self.models[:1])
        posts = {
            "/v1/chat/completions": self._complete,
            "/v1/tokenize": self._tokenize,
            "/v1/models/load": self._load,
            "/v1/models/unload": self._load,
            "/v1/extract-text": extract_text,
            "/api/pull": self._pull,
        }
        routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()]
        return Starlette(
            routes=[
                *page_routes(),
                Route("/v1/models", self._list_models),
                Route("/v1/catalog", self._catalog),
                *routes,
            ],
            middleware=[Middleware(ErrorMiddleware)],
        )

    def go_on(self) -> None:
        """Continue the answer that waits."""
        self.goes_on = True

    def _refused(self, request: Request) -> Response | None:
        if self.api_key and request.headers.get("authorization") != f"Bearer {self.api_key}":
            return _error(401, "this server needs an API key")
        return None

    async def _list_models(self, request: Request) -> Response:
        values = {"object": "model", "created": 0, "context_length": 4096, "size": 1_580_733, "quantization": "4bit"}
        values |= {"parameters": 2_670_000, "example_prompt": self.example}
        models = [{"id": name, "loaded": name in self.loaded, **values} for name in self.models]
        return self._refused(request) or JSONResponse({"object": "list", "data": models})

    async def _catalog(self, request: Request) -> Response:
        entry = {"id": "smollm2-135m", "description": "Tiny and quick.", "size": 98_362_432}
        return JSONResponse({"data": [entry] if self.pull else []})

    async def _keep(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = await request.json()
        self.other_requests.append((request.url.path, body))
        return body

    async def _tokenize(self, request: Request) -> Response:
        """Words are the tokens of this server."""
        count = len((await self._keep(request))["prompt"].split())
        if count > 100_000:
            return _error(400, "the prompt is too long")
        return JSONResponse({"count": count, "max_model_len": 4096})

    async def _load(self, request: Request) -> Response:
        name = (await self._keep(request))["model"]
        if name == "broken-model":
            return _error(503, "the model broken-model can't be loaded")
        self.loaded ^= {name}
        return JSONResponse({"success": True})

    async def _pull(self, request: Request) -> Response:
        name = (await self._keep(request))["model"]

        async def stream() -> AsyncIterator[str]:
            for number, progress in enumerate(self.pull):
                if number:
                    await self._wait()
                yield json.dumps(progress) + "\n"
            if progress.get("status") == "success":
                self.models.append(name)

        return StreamingResponse(stream(), media_type="application/x-ndjson")

    async def _complete(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        self.requests.append(await request.json())
        answer = self.answers.pop(0) if self.answers else Answer()
        if answer.status != 200:
            return _error(answer.status, answer.error)
        return StreamingResponse(self._stream(answer), media_type="text/event-stream")

    async def _stream(self, answer: Answer) -> AsyncIterator[str]:
        if answer.prompt_tokens:
            yield f": reading the prompt, {answer.prompt_tokens // 2} of {answer.prompt_tokens} tokens\n\n"
            await self._wait()
        yield _chunk({"role": "assistant"})
        for piece in answer.reasoning:
            entry = {"token": piece, "logprob": -1.0, "bytes": None, "top_logprobs": []}
            yield _chunk({"reasoning_content": piece}, logprobs=[entry] if answer.logprobs else None)
        logprobs = iter(answer.logprobs)
        for text in answer.text:
            if text is None:
                await self._wait()
            else:
                yield _chunk({"content": text}, logprobs=next(logprobs, None))
        if answer.error:
            yield _event({"error": {"message": answer.error, "type": "server_error", "param": None, "code": None}})
        elif not answer.lost:
            yield _chunk({}, answer.finish_reason)
            tokens = len(answer.text) + len(answer.reasoning)
            usage = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": tokens, "total_tokens": tokens}
            timings = {"predicted_per_second": 12.34}
            yield _event({"object": "chat.completion.chunk", "choices": [], "usage": usage, "timings": timings})
            yield "data: [DONE]\n\n"

    async def _wait(self) -> None:
        while not self.goes_on:
            await asyncio.sleep(0.01)
        self.goes_on = False


def _chunk(
    delta: dict[str, Any], finish_reason: str | None = None, logprobs: list[dict[str, Any]] | None = None
) -> str:
    choice = {
        "index": 0,
        "delta": delta,
        "finish_reason": finish_reason,
        "logprobs": logprobs and {"content": logprobs},
    }
    return _event({"id": "1", "object": "chat.completion.chunk", "model": "tiny-model", "choices": [choice]})


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _error(status: int, message: str) -> JSONResponse:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error}, status)
