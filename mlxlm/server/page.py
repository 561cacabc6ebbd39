"""The chat page: routes for the files of `page/`, and their content security policy."""

from __future__ import annotations

import hashlib
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PAGE_FOLDER = Path(__file__).parent / "page"

# The page shows what a model has written. If something gets past the sanitizer, it can't run or load anything.
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
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
}


def page_routes() -> list[Route]:
    """The routes of the chat page: `/`, and `/page/...` for its other files."""
    files = sorted(path for path in PAGE_FOLDER.rglob("*") if path.suffix in _MEDIA_TYPES)
    return [_route(path) for path in files]


def _route(path: Path) -> Route:
    content = path.read_bytes()
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'  # of the content: installers change modification times
    headers = {**_HEADERS, "ETag": etag}

    async def serve(request: Request) -> Response:
        if etag in request.headers.get("If-None-Match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=_MEDIA_TYPES[path.suffix])

    name = path.relative_to(PAGE_FOLDER).as_posix()
    return Route("/" if name == "index.html" else f"/page/{name}", serve, name=f"page:{name}")
