"""The endpoints of the API. Each file here has the routes of its own in `ROUTES`; the server finds them."""

from __future__ import annotations

import pkgutil
from collections.abc import Awaitable, Callable
from importlib import import_module

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


def routes(path: str, endpoint: Callable[[Request], Awaitable[Response]], method: str = "POST") -> list[Route]:
    """The routes of an endpoint: its path with and without the prefix /v1."""
    return [Route(prefix + path, endpoint, methods=[method]) for prefix in ("/v1", "")]


def find_routes() -> list[Route]:
    """The routes of all files in this folder."""
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return [route for module in modules for route in module.ROUTES]
