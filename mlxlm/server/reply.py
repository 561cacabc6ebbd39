"""The reply to a request: its texts are generated, and sent as one JSON object or as a stream of events.

A stream has server-sent events, or a JSON object in each line.

All of it is cancelled when the client disconnects.
"""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from time import monotonic
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from mlxlm.chat.answer_parser import Piece
from mlxlm.generation import GenerationChunk, GenerationResult
from mlxlm.generation.result import TokenLogprobs
from mlxlm.server.errors import STOPPING, ApiError, invalid, to_api_error
from mlxlm.server.metrics import MODEL, Metrics
from mlxlm.server.models import ServedModel
from mlxlm.server.schemas import ChoicesRequest, ReplyFields
from mlxlm.server.text import Text

KEEP_ALIVE_SECONDS = 1.0  # after so long without a chunk, a stream gets a comment
_QUEUE_SIZE = 64  # chunks; further ones wait in their TextStream, which pauses generation if there are too many
SSE, NDJSON = "text/event-stream", "application/x-ndjson"
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}

Event = dict[str, Any]
Value = TypeVar("Value")


def encode_event(event: Event, media_type: str = SSE) -> bytes:
    """Encode an event for a stream. A server-sent event is named by its `type`, if it has one."""
    data = json.dumps(event, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    if media_type == NDJSON:
        return f"{data}\n".encode()
    head = f"event: {event['type']}\n" if "type" in event else ""
    return f"{head}data: {data}\n\n".encode()


class Reply(ABC):
    """The reply in the form of one API, built from the pieces of its texts.

    Attributes:
        model: The model that generates the texts.
        texts: The texts, which `respond` submits.
        last_line: The line after the last event of a stream.
        media_type: That of a stream, `SSE` or `NDJSON`.
        start_time: When the request began to wait for its model, on the monotonic clock.
        load_seconds: How long it waited.
    """

    last_line = b""
    media_type = SSE
    start_time = load_seconds = 0.0

    def __init__(self, model: ServedModel, texts: Sequence[Text]):
        self.model, self.texts = model, texts

    @abstractmethod
    def start(self) -> Iterable[Event]:
        """Return the events before the first chunk."""

    @abstractmethod
    def push(self, text: Text, pieces: Sequence[Piece]) -> Iterable[Event]:
        """Return the events of pieces that were added to a text, and of its end if that is reached."""

    @abstractmethod
    def finish(self) -> Iterable[Event]:
        """Return the events after the last chunk."""

    @abstractmethod
    def complete(self) -> dict[str, Any]:
        """Return the JSON object of a request that isn't streamed."""

    def fail(self, error: ApiError, path: str) -> Event:
        """Return the event of an error after the first event, in the endpoint `path`."""
        return error.body(path)

    def encode(self, event: Event) -> bytes:
        """Encode an event for the stream."""
        return encode_event(event, self.media_type)

    def progress(self) -> bytes:
        """What keeps a stream without chunks open: a comment, which clients ignore."""
        of = sum(len(text.request.prompt) for text in self.texts)
        # The last token of a prompt is read with the first new one.
        read = sum(len(t.request.prompt) if t.stream.num_generated else t.stream.num_read for t in self.texts)
        return f": reading the prompt, {read} of {of} tokens\n\n".encode() if read < of else b": generating\n\n"


class ChoicesReply(Reply):
    """The reply of chat completions and completions: `choices`, one for each text; events have one choice each.

    Args:
        model: See `Reply`.
        texts: See `Reply`.
        body: The request.
        head: The id and object of the response and of each event.
    """

    last_line = b"data: [DONE]\n\n"

    def __init__(self, model: ServedModel, texts: Sequence[Text], body: ChoicesRequest, head: dict[str, Any]):
        super().__init__(model, texts)
        self.body = body
        self._head = {**head, "model": model.name, "created": int(time.time())}

    @abstractmethod
    def start_choice(self, text: Text) -> dict[str, Any] | None:
        """Return the choice of the event before the first chunk, if there is one."""

    @abstractmethod
    def choice(self, text: Text, piece: Piece | None) -> dict[str, Any]:
        """Return the choice of an event with a piece, or with none; `logprobs` and `finish_reason` are None."""

    @abstractmethod
    def describe_logprobs(self, text: Text, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """Return the `logprobs` of the next tokens of a text."""

    @abstractmethod
    def complete_choice(self, text: Text) -> dict[str, Any]:
        """Return the choice of a response that isn't streamed."""

    def start(self) -> list[Event]:
        """Return the role of each message, or each prompt that is echoed."""
        return [self._event(first) for text in self.texts if (first := self.start_choice(text)) is not None]

    def push(self, text: Text, pieces: Sequence[Piece]) -> list[Event]:
        """Return one event for each piece, and one for the finish reason."""
        choices = [self.choice(text, piece) for piece in pieces if piece.text or piece.part.kind == "call"]
        if logprobs := text.take_logprobs():
            choices = choices or [self.choice(text, None)]
            choices[-1]["logprobs"] = self.describe_logprobs(text, logprobs)
        if text.finish_reason is not None:
            choices.append({**self.choice(text, None), "finish_reason": text.finish_reason})
        return [self._event(choice) for choice in choices]

    def finish(self) -> list[Event]:
        """Return the usage, if the request asks for it."""
        return [{**self._head, "choices": [], **self._statistics()}] if self.body.include_usage else []

    def complete(self) -> dict[str, Any]:
        """Return the response."""
        return {**self._head, "choices": [self.complete_choice(text) for text in self.texts], **self._statistics()}

    def _event(self, choice: dict[str, Any]) -> Event:
        return {**self._head, "choices": [choice], **({"usage": None} if self.body.include_usage else {})}

    def _statistics(self) -> dict[str, Any]:
        """The usage, and the timings of a single text. The prompt of several samples counts once."""
        results = [text.result for text in self.texts if text.result is not None]
        prompt_tokens = sum(len(text.request.prompt) for text in self.texts[:: self.body.n])
        completion_tokens = sum(len(result.tokens) for result in results)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(result.cached_tokens for result in results[:: self.body.n])},
            "completion_tokens_details": {"reasoning_tokens": sum(text.reasoning_tokens for text in self.texts)},
        }
        return {"usage": usage, "timings": timings_of(results[0])} if len(results) == 1 else {"usage": usage}


def timings_of(result: GenerationResult) -> dict[str, Any]:
    """The `timings` of llama.cpp's server. The time of the first token belongs to the prompt."""
    timings, num_decoded = result.timings, len(result.tokens) - 1
    first, speed = timings.time_to_first_token, timings.tokens_per_second
    return {
        "cache_n": result.cached_tokens,
        "prompt_n": result.prompt_tokens - result.cached_tokens,
        "prompt_ms": first and 1000 * first,
        "prompt_per_second": timings.prompt_tokens_per_second,
        "predicted_n": len(result.tokens),
        "predicted_ms": speed and 1000 * num_decoded / speed,
        "predicted_per_second": speed,
    }


MakeReply = Callable[[ServedModel], Awaitable[Reply]]


async def respond(request: Request, body: ReplyFields, make_reply: MakeReply, media_type: str = SSE) -> Response:
    """Load a model, generate the texts of the reply that `make_reply` makes for it, and send the reply.

    Args:
        request: The request.
        body: Its body.
        make_reply: Encodes the prompts. Errors up to the first event are raised.
        media_type: That of a stream, `SSE` or `NDJSON`.
    """
    replying = _replying(request, body, make_reply, media_type)
    if not body.stream:
        return await json_response(request, _complete(replying, request.app.state.metrics))
    return await stream_response(request, _stream(replying, request.app.state.metrics, request.url.path), media_type)


async def stream_response(request: Request, events: AsyncGenerator[bytes], media_type: str) -> Response:
    """The response with a stream of events. Errors up to the first event are raised."""
    try:
        first = await _while_connected(request.scope, request.receive, anext(events))
    except BaseException:
        await events.aclose()
        raise
    if first is None:
        await events.aclose()
        return Response(status_code=499)  # nobody reads it
    return EventResponse(first, events, media_type)


async def json_response(request: Request, work: Coroutine[Any, Any, dict[str, Any]]) -> Response:
    """The response with the result of `work`, which is cancelled if the client disconnects."""
    result = await _while_connected(request.scope, request.receive, work)
    return Response(status_code=499) if result is None else JSONResponse(result)


@asynccontextmanager
async def _replying(
    request: Request, body: ReplyFields, make_reply: MakeReply, media_type: str
) -> AsyncIterator[Reply]:
    """Generate the texts of a reply. At the end of the block, unfinished ones are cancelled.

    Raises:
        ApiError: 400 for a prompt or options that the model can't serve, 429 if too many texts wait already.
    """
    start = monotonic()
    async with request.app.state.models.use(body.model, body.keep_alive) as model:
        load_seconds = monotonic() - start
        request.scope[MODEL] = model.name
        reply = await make_reply(model)
        reply.media_type, reply.start_time, reply.load_seconds = media_type, start, load_seconds
        if len(reply.texts) > (most := model.settings.max_waiting):
            raise invalid(f"the request is for {len(reply.texts)} texts, and at most {most} may wait (try: fewer)")
        if (first := reply.texts[0].request).options.constraint is not None:
            await asyncio.to_thread(first.compile_grammar, model.lm)  # which is cached for the engine
        streams = []
        try:
            for text in reply.texts:
                streams.append(text.submit(model))  # noqa: PERF401 - so that it is cancelled if the next one fails
            yield reply
        finally:
            for stream in streams:
                stream.cancel()
            for stream in streams:
                with suppress(Exception):  # the error of a text, which its reader has raised
                    request.app.state.metrics.add_result(model.name, stream.result())


async def _complete(replying: AbstractAsyncContextManager[Reply], metrics: Metrics) -> dict[str, Any]:
    async with replying as reply:
        async for item in _chunks(reply, metrics):
            if item is not None:
                text, chunk = item
                for _ in reply.push(text, text.push(chunk)):
                    pass
        return reply.complete()


async def _stream(replying: AbstractAsyncContextManager[Reply], metrics: Metrics, path: str) -> AsyncGenerator[bytes]:
    async with replying as reply:
        started = False
        try:
            async for item in _chunks(reply, metrics):
                if not started:
                    started = True
                    for event in reply.start():
                        yield reply.encode(event)
                if item is None:
                    yield reply.progress()
                    continue
                text, chunk = item
                for event in reply.push(text, text.push(chunk)):
                    yield reply.encode(event)
            for event in reply.finish():
                yield reply.encode(event)
            if reply.last_line:
                yield reply.last_line
        except Exception as error:
            if not started:
                raise
            yield reply.encode(reply.fail(to_api_error(error), path))


async def _chunks(reply: Reply, metrics: Metrics) -> AsyncGenerator[tuple[Text, GenerationChunk] | None]:
    """Yield the chunks of all texts as they come, and None after `KEEP_ALIVE_SECONDS` without any; raise their errors.

    At the end all texts have their results.
    """
    # A None in the queue is the end of a stream.
    queue: asyncio.Queue[tuple[Text, GenerationChunk] | Exception | None] = asyncio.Queue(_QUEUE_SIZE)

    async def read(text: Text) -> None:
        try:
            async for chunk in text.stream:
                await queue.put((text, chunk))
            text.result = await text.stream.wait()
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    start, times = monotonic(), dict[Text, float]()  # of the last token
    first_token = metrics.first_token.labels(reply.model.name)
    inter_token = metrics.inter_token.labels(reply.model.name)
    tasks = [asyncio.create_task(read(text)) for text in reply.texts]
    try:
        left = len(tasks)
        while left:
            try:
                async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                    item = await queue.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
                continue
            text, chunk = item
            if chunk.token is not None:
                now = monotonic()
                if not times:
                    first_token.observe(now - start)
                if text in times:
                    inter_token.observe(now - times[text])
                times[text] = now
            yield item
    finally:
        for task in tasks:
            task.cancel()


class EventResponse(Response):
    """A response that streams events. Their generator is closed when the client disconnects."""

    def __init__(self, first: bytes, events: AsyncGenerator[bytes], media_type: str):
        """`first` is an event that comes before those of the generator."""
        super().__init__(status_code=200, headers=_HEADERS, media_type=media_type)
        del self.headers["content-length"]
        self._first, self._events = first, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send each event as soon as it is available."""
        try:
            await _while_connected(scope, receive, self._send(send))
        except asyncio.CancelledError:  # at shutdown, after --shutdown-timeout
            last = encode_event(ApiError(503, STOPPING).body(scope["path"]), self.media_type or SSE)
            with suppress(TimeoutError):
                async with asyncio.timeout(1):
                    await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            await self._events.aclose()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self._first, "more_body": True})
        async with aclosing(self._events) as events:
            async for event in events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _while_connected(scope: Scope, receive: Receive, work: Awaitable[Value]) -> Value | None:
    """Run `work`. If the client disconnects first, cancel it and return None."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.create_task(disconnected())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        scope["mlxlm.client_left"] = True
        return None
    finally:
        for task in (working, leaving):
            if task.cancel():
                with suppress(asyncio.CancelledError, Exception):
                    await task
