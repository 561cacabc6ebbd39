"""LM Studio's API: its lists of models under /api/v0 and /api/v1, and OpenAI's endpoints under /api/v0."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from mlxlm.server.endpoints.chat_completions import chat_completions
from mlxlm.server.endpoints.completions import completions
from mlxlm.server.endpoints.embeddings import embeddings
from mlxlm.server.model_description import ModelDescription
from mlxlm.utils.formatting import human_count


async def list_models_v0(request: Request) -> JSONResponse:
    """List the models."""
    return JSONResponse(
        {"object": "list", "data": [_describe_v0(*model) for model in await request.app.state.models.describe_all()]}
    )


async def get_model_v0(request: Request) -> JSONResponse:
    """Describe one model."""
    name = request.path_params["id"]
    return JSONResponse(_describe_v0(name, await request.app.state.models.describe(name)))


async def list_models_v1(request: Request) -> JSONResponse:
    """List the models, and which of them are loaded."""
    return JSONResponse({"models": [_describe_v1(*model) for model in await request.app.state.models.describe_all()]})


def _describe_v0(name: str, model: ModelDescription) -> dict[str, Any]:
    loaded = {"state": "loaded", "loaded_context_length": model.context_length}
    return {
        "id": name,
        "object": "model",
        "type": "embeddings" if model.is_embedding_model else "llm",
        "publisher": _publisher(name),
        "arch": model.family,
        "compatibility_type": _format(model),
        "quantization": model.quantization,
        "max_context_length": model.context_length,
        **(loaded if model.loaded else {"state": "not-loaded"}),
    }


def _describe_v1(name: str, model: ModelDescription) -> dict[str, Any]:
    instance = {"id": name, "config": {"context_length": model.context_length}}
    return {
        "type": "embedding" if model.is_embedding_model else "llm",
        "publisher": _publisher(name),
        "key": name,
        "display_name": name.rpartition("/")[2],
        "architecture": model.family,
        "quantization": {"name": model.quantization, "bits_per_weight": _bits_per_weight(model)},
        "size_bytes": model.bytes,
        "params_string": human_count(model.parameters or 0),
        "loaded_instances": [instance] if model.loaded else [],
        "max_context_length": model.context_length,
        "format": _format(model),
        "capabilities": {"vision": False, "trained_for_tool_use": True},
    }


def _bits_per_weight(model: ModelDescription) -> float | None:
    return round(8 * model.bytes / model.parameters, 1) if model.parameters else None


def _publisher(name: str) -> str:
    return name.rpartition("/")[0]


def _format(model: ModelDescription) -> str:
    return "gguf" if model.format == "gguf" else "mlx"


ROUTES = [
    Route("/api/v0/models", list_models_v0),
    Route("/api/v0/models/{id:path}", get_model_v0),
    Route("/api/v1/models", list_models_v1),
    Route("/api/v0/chat/completions", chat_completions, methods=["POST"]),
    Route("/api/v0/completions", completions, methods=["POST"]),
    Route("/api/v0/embeddings", embeddings, methods=["POST"]),
]
