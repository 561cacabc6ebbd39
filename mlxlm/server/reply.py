"""The reply to a request for text: one JSON object, or a stream of events."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from mlxlm.generation import FinishReason, GenerationChunk, GenerationResult
from mlxlm.server.events import json_response, stream_response
from mlxlm.server.texts import Texts

Event = dict[str, Any]

# OpenAI's finish reasons. If no token can continue a constraint, the text is incomplete, as with a length limit.
FINISH_REASONS: dict[FinishReason, str] = {
    "eos": "stop",
    "stop": "stop",
    "length": "length",
    "context": "length",
    "constraint": "length",
}


def new_id(prefix: str) -> str:
    """A random id, such as chatcmpl-0123456789abcdef01234567."""
    return f"{prefix}{secrets.token_hex(12)}"


class Reply(ABC):
    """Builds the reply of one API from generated chunks.

    Attributes:
        texts: The texts that are being generated.
        last_line: The line after the last event of a stream.
    """

    last_line = b""

    def __init__(self, texts: Texts):
        self.texts = texts

    @abstractmethod
    def start(self) -> Iterable[Event]:
        """Return the events before the first chunk."""

    @abstractmethod
    def push(self, index: int, chunk: GenerationChunk) -> Iterable[Event]:
        """Add a chunk of the text `index`, and return its events."""

    @abstractmethod
    def finish(self, results: Sequence[GenerationResult]) -> Iterable[Event]:
        """Return the events after the last chunk."""

    @abstractmethod
    def complete(self, results: Sequence[GenerationResult]) -> dict[str, Any]:
        """Return the JSON object of a request that isn't streamed."""

    @abstractmethod
    def encode(self, event: Event) -> bytes:
        """Encode an event for the stream."""

    @abstractmethod
    def encode_error(self, error: Exception) -> bytes:
        """Encode the event for an error after the first event."""


async def respond(request: Request, replying: AbstractAsyncContextManager[Reply], stream: bool | None) -> Response:
    """Send a reply. Entering `replying` starts generation, and leaving it cancels unfinished texts."""
    if stream:
        return await stream_response(request, _stream(replying))
    return await json_response(request, _complete(replying))


async def _complete(replying: AbstractAsyncContextManager[Reply]) -> dict[str, Any]:
    async with replying as reply:
        async for item in reply.texts.chunks():
            if item is not None:
                for _ in reply.push(*item):
                    pass
        return reply.complete(await reply.texts.results())


async def _stream(replying: AbstractAsyncContextManager[Reply]) -> AsyncGenerator[bytes]:
    async with replying as reply:
        started = False
        try:
            async for item in reply.texts.chunks():
                if not started:
                    started = True
                    for event in reply.start():
                        yield reply.encode(event)
                if item is None:
                    yield reply.texts.progress()
                    continue
                for event in reply.push(*item):
                    yield reply.encode(event)
            for event in reply.finish(await reply.texts.results()):
                yield reply.encode(event)
            if reply.last_line:
                yield reply.last_line
        except Exception as error:
            if not started:
                raise
            yield reply.encode_error(error)
