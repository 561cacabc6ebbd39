"""The application: endpoints, middleware, and the files of the chat page."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from mlxlm.server.endpoints import find_routes
from mlxlm.server.errors import ErrorMiddleware, error_response
from mlxlm.server.logs import RequestLog
from mlxlm.server.metrics import Metrics
from mlxlm.server.models import Models
from mlxlm.server.options import OLLAMA_PORT
from mlxlm.server.request_body import UnknownFields
from mlxlm.server.security import AccessMiddleware, AccessRules
from mlxlm.server.stored_responses import StoredResponses

PAGE_FOLDER = Path(__file__).parent / "page"

# The page shows what a model has written. If something gets past the sanitizer, it can't run or load anything.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types dompurify"
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # cached, but revalidated by ETag: a page must not mix files of two versions
}
_MEDIA_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".md": "text/markdown",
    ".mjs": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".woff2": "font/woff2",
}


def make_app(models: Models, rules: AccessRules | None = None, *, strict: bool = False) -> Starlette:
    """The application that serves `models`.

    Args:
        models: The models.
        rules: Who may use it; by default anyone who can reach it.
        strict: Whether a request with an unknown field is refused.
    """
    rules = rules or AccessRules()
    all_routes = [*find_routes(), Route("/health", health), Route("/metrics", render_metrics), *page_routes()]
    metrics = Metrics(models)
    middleware = [
        Middleware(RequestLog, metrics, [route.path for route in all_routes]),
        Middleware(ErrorMiddleware),
        Middleware(AccessMiddleware, rules),
    ]
    if rules.cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=rules.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id"],
        )
        middleware.insert(1, cors)  # error responses need its headers, too

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        models.start()
        yield
        await models.close()

    app = Starlette(
        routes=all_routes, middleware=middleware, exception_handlers={HTTPException: error_response}, lifespan=lifespan
    )
    app.router.redirect_slashes = False
    app.state.models, app.state.metrics = models, metrics
    app.state.unknown_fields, app.state.stored_responses = UnknownFields(strict), StoredResponses()
    return app


async def health(_request: Request) -> JSONResponse:
    """Say that the server is running."""
    return JSONResponse({"status": "ok"})


async def render_metrics(request: Request) -> Response:
    """Return the metrics in Prometheus' text format."""
    return Response(generate_latest(request.app.state.metrics.registry), media_type=CONTENT_TYPE_LATEST)


def page_routes() -> list[Route]:
    """The routes of the chat page: `/`, and `/page/...` for its other files."""
    return [_route(path) for path in sorted(PAGE_FOLDER.rglob("*")) if path.suffix in _MEDIA_TYPES]


def _route(path: Path) -> Route:
    name, content = path.relative_to(PAGE_FOLDER).as_posix(), path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'  # of the content: installers change modification times
    headers = {**_HEADERS, "ETag": etag}

    async def serve(request: Request) -> Response:
        # Clients of ollama look for this text at its port. Browsers ask for HTML.
        wants_html = "text/html" in request.headers.get("accept", "")
        if name == "index.html" and request.url.port == OLLAMA_PORT and not wants_html:
            return PlainTextResponse("Ollama is running")
        if etag in request.headers.get("If-None-Match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=_MEDIA_TYPES[path.suffix])

    return Route("/" if name == "index.html" else f"/page/{name}", serve, name=f"page:{name}")
