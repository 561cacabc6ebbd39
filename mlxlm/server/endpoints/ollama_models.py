"""The endpoints of ollama's API about models: list, describe, download, remove and rename them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxlm.chat.reasoning import OPEN
from mlxlm.checkpoint import open_checkpoint
from mlxlm.checkpoint.local_models import HUB, OWN, find_removable, remove
from mlxlm.server.endpoints.ollama import OllamaRequest, timestamp
from mlxlm.server.errors import ApiError, invalid, to_api_error
from mlxlm.server.model_library import ModelDescription
from mlxlm.server.models import Models
from mlxlm.server.reply import NDJSON, Event, encode_event, json_response, stream_response
from mlxlm.server.request_body import read_body
from mlxlm.server.schemas import Fields
from mlxlm.tokenizer import FillInTheMiddle, Tokenizer
from mlxlm.utils.errors import CheckpointError, ConfigError, MlxlmError, TokenizerError
from mlxlm.utils.formatting import human_count

VERSION = "0.13.0"  # of ollama, whose API this is: clients ask for it to know what they can use


async def version(_request: Request) -> JSONResponse:
    """Return the version of ollama whose API this is."""
    return JSONResponse({"version": VERSION})


async def tags(request: Request) -> JSONResponse:
    """List the models."""
    models: Models = request.app.state.models
    return JSONResponse({"models": [_describe(*listed) for listed in await models.describe_all()]})


async def ps(request: Request) -> JSONResponse:
    """List the models that are in memory."""
    models: Models = request.app.state.models
    listed = []
    for model in models.loaded:
        expires = models.expires_at(model.name)
        listed.append(
            {
                **_describe(model.name, await models.describe(model.name)),
                "size": model.memory,
                "size_vram": model.memory,
                "context_length": model.context_length,
                "expires_at": timestamp(_NEVER if expires is None else datetime.fromtimestamp(expires, UTC)),
            }
        )
    return JSONResponse({"models": listed})


_NEVER = datetime(2318, 1, 1, tzinfo=UTC)  # what ollama says of a model that stays


def _describe(name: str, model: ModelDescription) -> dict[str, Any]:
    full_name = name if ":" in name else f"{name}:latest"
    return {
        "name": full_name,
        "model": full_name,
        "modified_at": timestamp(model.modified),
        "size": model.bytes,
        "digest": model.digest,
        "details": _details(model),
    }


def _details(model: ModelDescription) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": model.format,
        "family": model.family,
        "families": [model.family] if model.family else [],
        "parameter_size": human_count(model.parameters or 0),
        "quantization_level": model.quantization,
    }


async def show(request: Request) -> JSONResponse:
    """Describe a model: its size, its chat template, and what it can do."""
    body = await read_body(request, OllamaRequest)
    models: Models = request.app.state.models
    model = await models.describe(body.model)
    tokenizer = await asyncio.to_thread(_tokenizer_of, models, model)
    template = (tokenizer and tokenizer.chat_template) or ""
    capabilities = ["completion", "tools"]  # a grammar makes any model call tools
    if OPEN in template:
        capabilities.append("thinking")
    if tokenizer is not None:
        with suppress(TokenizerError):
            FillInTheMiddle(tokenizer)
            capabilities.append("insert")
    return JSONResponse(
        {
            "modelfile": f"FROM {body.model}\n",
            "parameters": "",
            "template": template,
            "details": _details(model),
            "model_info": {
                "general.architecture": model.family,
                "general.parameter_count": model.parameters,
                f"{model.family}.context_length": model.context_length,
            },
            "capabilities": capabilities,
            "modified_at": timestamp(model.modified),
        }
    )


def _tokenizer_of(models: Models, description: ModelDescription) -> Tokenizer | None:
    """The tokenizer of a model, without loading the model; None if it can't be read."""
    for model in models.loaded:
        if model.name == description.name:
            return model.lm.tokenizer
    with suppress(MlxlmError):
        return open_checkpoint(description.path).load_tokenizer()
    return None


class PullRequest(OllamaRequest):
    """The body of /api/pull."""

    stream: bool | None = None


async def pull(request: Request) -> Response:
    """Download a model, unless it is here."""
    body = await read_body(request, PullRequest)
    events = _pull(request.app.state.models, body.model or "")
    if body.stream is not False:
        return await stream_response(request, _encode(events, request.url.path), NDJSON)

    async def last() -> Event:
        return [event async for event in events][-1]

    return await json_response(request, last())


async def _pull(models: Models, source: str) -> AsyncGenerator[Event]:
    async for progress in models.pull(source):
        sizes = {"total": progress.total, "completed": progress.completed}
        yield {"status": f"pulling {source}", "digest": source, **(sizes if progress.total else {})}
    yield {"status": "success"}


async def _encode(events: AsyncGenerator[Event], path: str) -> AsyncGenerator[bytes]:
    """Encode events. An error after the first one is an event, too."""
    started = False
    try:
        async for event in events:
            yield encode_event(event, NDJSON)
            started = True
    except Exception as error:
        if not started:
            raise
        yield encode_event(to_api_error(error).body(path), NDJSON)


async def delete(request: Request) -> Response:
    """Remove a downloaded model, by the rules of mlxlm models rm; or an alias that /api/copy has made."""
    body = await read_body(request, OllamaRequest)
    models: Models = request.app.state.models
    if models.library.remove_alias(body.model or ""):
        return Response()
    model = await models.describe(body.model)
    try:
        if model.location not in (OWN, HUB):
            raise CheckpointError(f"{model.name} isn't a model that mlxlm has downloaded", "whoever put it there")
        removable = await asyncio.to_thread(find_removable, model.name)
        await models.unload(model.name)
        await asyncio.to_thread(remove, removable)
    except CheckpointError as error:
        raise ApiError(403, str(error)) from None
    return Response()


class CopyRequest(Fields):
    """The body of /api/copy."""

    source: str
    destination: str = Field(min_length=1, max_length=200)


async def copy(request: Request) -> Response:
    """Give a model another name, until the server stops. Nothing is copied."""
    body = await read_body(request, CopyRequest)
    models: Models = request.app.state.models
    name = models.find(body.source)
    try:
        models.library.add_alias(body.destination, name)
    except ConfigError as error:
        raise invalid(str(error), "destination") from None
    return Response()


async def refuse(request: Request) -> Response:
    """Refuse to make or upload a model."""
    await read_body(request, OllamaRequest)
    action = request.url.path.rpartition("/")[2]
    raise invalid(f"this server can't {action} models (try: mlxlm convert, quantize or finetune)")


ROUTES = [
    *(Route(f"/api/{function.__name__}", function) for function in (version, tags, ps)),
    *(Route(f"/api/{function.__name__}", function, methods=["POST"]) for function in (show, pull, copy)),
    *(Route(f"/api/{name}", refuse, methods=["POST"]) for name in ("create", "push")),
    Route("/api/delete", delete, methods=["DELETE"]),
]
