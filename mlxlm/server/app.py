"""The application: endpoints and middleware."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from mlxlm.server.chat_completions import chat_completions
from mlxlm.server.completions import completions
from mlxlm.server.embeddings import embeddings
from mlxlm.server.errors import ErrorMiddleware, error_response
from mlxlm.server.messages import count_tokens, messages
from mlxlm.server.metrics import Metrics, RequestCounter
from mlxlm.server.models import Models
from mlxlm.server.page import page_routes
from mlxlm.server.responses import responses
from mlxlm.server.security import AccessMiddleware, AccessRules
from mlxlm.server.state import ServerState
from mlxlm.server.tokens import detokenize, tokenize


def make_app(models: Models, rules: AccessRules | None = None) -> Starlette:
    """The application that serves `models`. Without `rules`, anyone who can reach it may use it."""
    rules = rules or AccessRules()
    routes = [
        *_both("/chat/completions", chat_completions, "POST"),
        *_both("/completions", completions, "POST"),
        *_both("/responses", responses, "POST"),
        *_both("/messages", messages, "POST"),
        *_both("/messages/count_tokens", count_tokens, "POST"),
        *_both("/embeddings", embeddings, "POST"),
        *_both("/models", list_models, "GET"),
        *_both("/models/{id:path}", get_model, "GET"),
        *_both("/tokenize", tokenize, "POST"),
        *_both("/detokenize", detokenize, "POST"),
        Route("/health", health),
        Route("/metrics", render_metrics),
        *page_routes(),
    ]
    metrics = Metrics(models)
    middleware = [
        Middleware(RequestCounter, metrics, [route.path for route in routes]),
        Middleware(ErrorMiddleware),
        Middleware(AccessMiddleware, rules),
    ]
    if rules.cors_origins:
        allowed: dict[str, Any] = {
            "allow_origins": rules.cors_origins,
            "allow_methods": ["GET", "POST"],
            "allow_headers": ["*"],
            "expose_headers": ["x-request-id"],
        }
        middleware.insert(1, Middleware(CORSMiddleware, **allowed))  # error responses need its headers, too

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        yield
        await models.close()

    app = Starlette(
        routes=routes, middleware=middleware, exception_handlers={HTTPException: error_response}, lifespan=lifespan
    )
    app.router.redirect_slashes = False
    app.state.server = ServerState(models, metrics)
    return app


def _both(path: str, endpoint: Any, method: str) -> list[Route]:
    """The routes of an endpoint, with and without the prefix /v1."""
    return [Route(prefix + path, endpoint, methods=[method]) for prefix in ("/v1", "")]


async def list_models(request: Request) -> JSONResponse:
    """List the models that requests can name."""
    models: Models = request.app.state.server.models
    return JSONResponse({"object": "list", "data": [_describe(models, name) for name in models.names]})


async def get_model(request: Request) -> JSONResponse:
    """Describe one model."""
    models: Models = request.app.state.server.models
    return JSONResponse(_describe(models, models.find(request.path_params["id"])))


def _describe(models: Models, name: str) -> dict[str, Any]:
    """OpenAI's fields, whether the model is loaded, and its context length if it is."""
    values = {"id": name, "object": "model", "created": models.created, "owned_by": "mlxlm"}
    found = next((model for model in models.loaded if model.name == name), None)
    return {**values, "loaded": found is not None, "context_length": found and found.context_length}


async def health(_request: Request) -> JSONResponse:
    """Say that the server is running."""
    return JSONResponse({"status": "ok"})


async def render_metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    return Response(request.app.state.server.metrics.render(), media_type=CONTENT_TYPE_LATEST)
