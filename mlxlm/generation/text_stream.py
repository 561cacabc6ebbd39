"""The chunks of one text, while the engine generates it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress

from mlxlm.generation.request import Request
from mlxlm.generation.result import GenerationChunk, GenerationResult
from mlxlm.generation.text import Text


class TextStream(Iterator[GenerationChunk], AsyncIterator[GenerationChunk]):
    """The chunks of one text, as the engine generates them.

        for chunk in engine.submit(request):
            print(chunk.text, end="")

    Iterate in one thread, or with `async for` in one event loop. The other methods can be called from any thread.
    Dropping the stream cancels the text. If the loop falls behind by more than 1,000 chunks, the text pauses until it
    has caught up, unless its end is awaited: by `result`, `wait` or a done callback.
    """

    def __init__(self, text: Text, on_prefill: Callable[[int], None] | None = None):
        """Read a text of an engine; see `Engine.submit`."""
        self._text, self._on_prefill = text, on_prefill

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> GenerationChunk:
        while not isinstance(event := self._text.take(), GenerationChunk):
            if event is None:
                raise StopIteration
            if self._on_prefill is not None:
                self._on_prefill(event)
        return event

    def __aiter__(self) -> TextStream:
        return self

    async def __anext__(self) -> GenerationChunk:
        loop = asyncio.get_running_loop()
        while True:
            changed = asyncio.Event()
            try:
                event = self._text.take(_setter(loop, changed))
            except LookupError:
                await changed.wait()
                continue
            if event is None:
                raise StopAsyncIteration
            if isinstance(event, GenerationChunk):
                return event
            if self._on_prefill is not None:
                self._on_prefill(event)

    @property
    def request(self) -> Request:
        """The request, with its seed."""
        return self._text.request

    @property
    def seed(self) -> int:
        """The seed that the tokens are drawn with."""
        return self.request.options.seed or 0

    @property
    def num_read(self) -> int:
        """How many tokens of the prompt were read so far, those in the cache included."""
        return self._text.num_read

    @property
    def num_generated(self) -> int:
        """How many tokens were generated so far."""
        return len(self._text.tokens)

    @property
    def done(self) -> bool:
        """Whether the text has ended: `result` doesn't wait."""
        return self._text.ended

    def cancel(self) -> None:
        """Stop here. Iteration ends, and `result` is what was iterated. No effect if the last chunk was iterated."""
        self._text.cancel()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the text has ended, in the thread that ends it; now if it already has.

        An exception that it raises is logged.
        """
        self._text.add_done_callback(callback)

    def result(self) -> GenerationResult:
        """The whole text with its statistics, when it has ended; if it was cancelled, what was iterated.

        Raises:
            GenerationError: The text has failed.
        """
        return self._text.result()

    async def wait(self) -> GenerationResult:
        """`result`, for asyncio."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        self.add_done_callback(_setter(loop, ended))
        await ended.wait()
        return self.result()

    def partial_result(self) -> GenerationResult:
        """What has been iterated so far, with its statistics. Doesn't raise if the text has failed."""
        return self._text.partial_result()

    def __del__(self) -> None:
        self._text.cancel()


def _setter(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> Callable[[], None]:
    """A function that sets an event of `loop` from any thread. No effect once the loop is closed."""

    def set_event() -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(event.set)

    return set_event
