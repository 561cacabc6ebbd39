"""POST /v1/extract-text: the text of a file, to put it into a message."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse

from mlxlm.chat.files import text_of
from mlxlm.server.endpoints import routes
from mlxlm.server.errors import invalid
from mlxlm.server.request_body import read_bytes


async def extract_text(request: Request) -> JSONResponse:
    """Return the text of the file in the body, whose name is a parameter of the query."""
    name = request.query_params.get("name", "")
    if not name or not name.isprintable():
        raise invalid("name should be the name of the file, in the query", "name")
    return JSONResponse({"text": await asyncio.to_thread(text_of, await read_bytes(request), name)})


ROUTES = routes("/extract-text", extract_text)
