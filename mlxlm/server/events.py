"""Server-sent events, and cancellation when a client disconnects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from mlxlm.server.errors import is_anthropic, stopping

_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

Value = TypeVar("Value")


def data_event(value: Any, name: str | None = None) -> bytes:
    """An event with JSON data."""
    data = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {data}\n\n".encode()


def comment(text: str) -> bytes:
    """A comment, which clients ignore. It keeps proxies from closing an idle connection."""
    return f": {text}\n\n".encode()


async def while_connected(request: Request, work: Coroutine[Any, Any, Value]) -> Value | None:
    """Run `work`. If the client disconnects first, cancel it and return None."""
    working, leaving = asyncio.create_task(work), asyncio.create_task(_disconnected(request.receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        request.scope["mlxlm.client_left"] = True
        return None
    finally:
        await _cancel(working, leaving)


class EventResponse(Response):
    """A response that streams events. Their generator is closed when the client disconnects."""

    media_type = "text/event-stream"

    def __init__(self, first: bytes, events: AsyncGenerator[bytes]):
        """`first` is an event that comes before those of the generator."""
        super().__init__(status_code=200, headers=_HEADERS)
        del self.headers["content-length"]
        self._first, self._events = first, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send each event as soon as it is available, and comments while there is none."""
        sending, leaving = asyncio.create_task(self._send(send)), asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
            else:
                scope["mlxlm.client_left"] = True
        except asyncio.CancelledError:  # at shutdown, after --shutdown-timeout
            await _cancel(sending, leaving)
            last = data_event(stopping().body(scope["path"]), "error" if is_anthropic(scope["path"]) else None)
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            await _cancel(sending, leaving)
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async with aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def stream_response(request: Request, events: AsyncGenerator[bytes]) -> Response:
    """The response with events. An error before the first one is raised, so that the response has its status."""
    try:
        first = await while_connected(request, _first(events))
    except BaseException:
        await events.aclose()
        raise
    if first is None:
        await events.aclose()
        return Response(status_code=499)  # nobody reads it
    return EventResponse(first, events)


async def json_response(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
    """The response with the result of `work`, which is cancelled if the client disconnects."""
    result = await while_connected(request, work)
    return Response(status_code=499) if result is None else JSONResponse(result)


async def _first(events: AsyncGenerator[bytes]) -> bytes:
    return await anext(events)


async def _disconnected(receive: Receive) -> None:
    """Wait until the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    unfinished = [task for task in tasks if task.cancel()]
    for task in unfinished:
        with suppress(asyncio.CancelledError, Exception):
            await task
