"""The endpoints of ollama's API about models: list, describe, download, remove and rename them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from datetime import UTC, datetime
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxlm.backend.mlx import ON_CPU
from mlxlm.chat.reasoning import reasoning_tags
from mlxlm.checkpoint.local_models import HUB, OWN, find_removable, remove
from mlxlm.server.endpoints.ollama import OllamaRequest, timestamp
from mlxlm.server.errors import ApiError, invalid, to_api_error
from mlxlm.server.model_description import ModelDescription
from mlxlm.server.models import Models, ServedModel
from mlxlm.server.reply import NDJSON, Event, encode_event, json_response, stream_response
from mlxlm.server.request_body import read_body
from mlxlm.server.schemas import Fields
from mlxlm.utils.errors import CheckpointError, ConfigError
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
    return JSONResponse({"models": [_describe_loaded(models, model) for model in models.loaded]})


def _describe_loaded(models: Models, model: ServedModel) -> dict[str, Any]:
    memory, expires = model.memory, models.expires_at(model) or _NEVER
    return {
        **_describe(model.name, model.description),
        "size": memory,
        "size_vram": 0 if ON_CPU else memory,
        "context_length": model.context_length,
        "expires_at": timestamp(expires),
    }


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
    model = await models.describe(body.model, with_tokenizer=True)
    template, family = model.chat_template or "", model.family
    capabilities = ["completion", "tools"]  # a grammar makes any model call tools
    if model.is_embedding_model:
        capabilities = ["embedding"]
    if reasoning_tags(template):
        capabilities.append("thinking")
    if model.fills_in_the_middle:
        capabilities.append("insert")
    return JSONResponse(
        {
            "modelfile": f"FROM {model.name}\n",
            "parameters": "",
            "template": template,
            "details": _details(model),
            "model_info": {
                "general.architecture": family,
                "general.parameter_count": model.parameters,
                f"{family}.context_length": model.context_length,
            },
            "capabilities": capabilities,
            "modified_at": timestamp(model.modified),
        }
    )


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
    async for completed, total in models.downloads.download(source):
        sizes = {"total": total, "completed": completed} if total else {}
        yield {"status": f"pulling {source}", "digest": source, **sizes}
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
    if not body.model:
        raise invalid("the model is missing", "model")
    if models.library.remove_alias(body.model):
        return Response()
    model = await models.describe(await models.find(body.model, or_any=False))
    try:
        if model.location not in (OWN, HUB):
            raise CheckpointError(f"{model.name} wasn't downloaded by mlxlm", "remove its files yourself")
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
    name = await models.find(body.source)
    try:
        models.library.add_alias(body.destination, name)
    except ConfigError as error:
        raise invalid(str(error), "destination") from None
    return Response()


async def refuse(request: Request) -> Response:
    """Refuse to make or upload a model."""
    action = request.url.path.split("/")[2]
    verb = "take files of" if action == "blobs" else action
    raise invalid(f"this server can't {verb} models (try: mlxlm convert, quantize or finetune)")


ROUTES = [
    *(Route(f"/api/{function.__name__}", function) for function in (version, tags, ps)),
    *(Route(f"/api/{function.__name__}", function, methods=["POST"]) for function in (show, pull, copy)),
    *(Route(f"/api/{name}", refuse, methods=["HEAD", "POST"]) for name in ("create", "push", "blobs/{digest}")),
    Route("/api/delete", delete, methods=["DELETE"]),
]
