"""The models: what they are, loading and unloading them, and downloads.

The list has the fields of OpenAI and of Anthropic, and more. The paths to load and unload models are those of
llama.cpp's server and of LM Studio's.
"""

from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mlxlm.checkpoint.catalog import catalog
from mlxlm.server.endpoints import routes
from mlxlm.server.errors import invalid
from mlxlm.server.model_library import ModelDescription
from mlxlm.server.models import Models
from mlxlm.server.request_body import read_body
from mlxlm.server.schemas import Fields


class ModelRequest(Fields):
    """The body of a request to load or unload a model."""

    model: str | None = None
    instance_id: str | None = None
    keep_alive: str | float | None = None

    @property
    def name(self) -> str:
        """The model; `instance_id` is LM Studio's field for a loaded one."""
        name = self.model or self.instance_id
        if not name:
            raise invalid("the model is missing", "model")
        return name


async def list_models(request: Request) -> JSONResponse:
    """List the models that requests can name, without those that can't be opened."""
    models: Models = request.app.state.models
    data = [_describe(*listed) for listed in await models.describe_all()]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": data, "has_more": False, **ends})


async def get_model(request: Request) -> JSONResponse:
    """Describe one model."""
    models: Models = request.app.state.models
    name = request.path_params["id"]
    description = await models.describe(name)
    return JSONResponse(_describe(name if name in models.library.names else description.name, description))


def _describe(name: str, description: ModelDescription) -> dict[str, Any]:
    """OpenAI's fields and Anthropic's, and what is known of a model without loading it."""
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "display_name": name,
        "created": int(description.modified.timestamp()),
        "created_at": description.modified.isoformat(),
        "owned_by": description.location,
        "loaded": description.loaded,
        "context_length": description.context_length,
        "size": description.bytes,
        "parameters": description.parameters,
        "quantization": description.quantization,
        "family": description.family,
        "format": description.format,
        "example_prompt": description.example_prompt,
        "problem": description.problem,
    }


async def list_catalog(request: Request) -> JSONResponse:
    """List the models of the catalog that can be downloaded: none if the command line names the models."""
    models: Models = request.app.state.models
    here = models.names
    entries = [entry for entry in catalog().values() if models.library.serves_all and entry.name not in here]
    data = [
        {
            "id": entry.name,
            "description": entry.description,
            "size": entry.bytes,
            "parameters": entry.parameters,
            "context_length": entry.context_length,
            "license": entry.license,
        }
        for entry in entries
    ]
    return JSONResponse({"object": "list", "data": data})


async def load(request: Request) -> JSONResponse:
    """Load a model, and answer when it is loaded."""
    body, start = await read_body(request, ModelRequest), time.monotonic()
    model = await request.app.state.models.load(body.name, body.keep_alive)
    seconds = time.monotonic() - start
    values = {"type": "llm", "instance_id": model.name, "status": "loaded", "load_time_seconds": seconds}
    return JSONResponse({"success": True, **values})


async def unload(request: Request) -> JSONResponse:
    """Unload a model. Requests that use it end first."""
    body = await read_body(request, ModelRequest)
    models: Models = request.app.state.models
    return JSONResponse({"success": await models.unload(body.name), "instance_id": models.find(body.name)})


ROUTES = [
    *routes("/models", list_models, "GET"),
    *routes("/catalog", list_catalog, "GET"),
    *routes("/models/load", load),
    *routes("/models/unload", unload),
    *routes("/models/{id:path}", get_model, "GET"),
    Route("/api/v1/models/load", load, methods=["POST"]),
    Route("/api/v1/models/unload", unload, methods=["POST"]),
]
