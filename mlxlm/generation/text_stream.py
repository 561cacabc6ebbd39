"""The text of one request, while the engine generates it: chunks to iterate, and the result at the end."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from mlxlm.backend.mlx import mx
from mlxlm.generation.request import Request
from mlxlm.generation.result import GenerationChunk, GenerationResult, Timings

if TYPE_CHECKING:
    from mlxlm.generation.sequence import TokenSequence

MAX_UNREAD = 1000  # chunks that wait for a slow reader; with more, the text pauses
_RESUME_UNREAD = MAX_UNREAD // 2  # with fewer, it goes on

logger = logging.getLogger(__name__)


class Channel:
    """What the engine's thread and the reader of a text share.

    Attributes:
        request: The request, with its seed.
        num_read: How many tokens of the prompt were read so far, those in the cache included.
        cancelled: Whether the reader no longer wants the text.
        ended: Whether the text is complete, has failed, or was cancelled.
        text: The state of the text; None before the engine has started it.
    """

    def __init__(self, request: Request):
        self.request = request
        self.num_read = 0
        self.cancelled = self.ended = False
        self.text: TokenSequence | None = None
        self._changed = threading.Condition()
        self._events: deque[GenerationChunk | int] = deque()  # chunks, and numbers of prompt tokens read
        self._result: GenerationResult | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []  # at the next change
        self._done_callbacks: list[Callable[[], None]] = []
        self._is_iterated = self._is_awaited = False  # whether a chunk was taken, whether the end is awaited
        self._on_resume: Callable[[], None] | None = None  # while the text pauses

    def push(self, event: GenerationChunk | int) -> None:
        """Pass on a chunk, or the number of prompt tokens read so far."""
        with self._changed:
            if isinstance(event, int):
                self.num_read = event
            if not self.ended:
                self._events.append(event)
            self._notify()

    def end(self, result: GenerationResult | None = None, error: BaseException | None = None) -> None:
        """End the text with its result or an error; without either, it was cancelled."""
        with self._changed:
            if self.ended:
                return
            self.ended, self._result, self._error = True, result, error
            self._notify()
            callbacks, self._done_callbacks = self._done_callbacks, []
        self._resume()
        for callback in callbacks:
            _call(callback)

    def cancel(self) -> None:
        """Drop what hasn't been taken, and end the text."""
        with self._changed:
            self.cancelled = True
            self._events.clear()
        self.end()

    def take(self, on_change: Callable[[], None] | None = None) -> GenerationChunk | int | None:
        """The next event; None at the end. Waits for it, unless `on_change` is given.

        Raises:
            LookupError: There is none yet; `on_change` will be called when there is.
            Exception: The text has failed.
        """
        with self._changed:
            while not self._events and not self.ended:
                if on_change is not None:
                    self._callbacks.append(on_change)
                    raise LookupError
                self._changed.wait()
            event = self._events.popleft() if self._events else None
            self._is_iterated = self._is_iterated or isinstance(event, GenerationChunk)
            has_room = len(self._events) < _RESUME_UNREAD
        if has_room:
            self._resume()
        if event is None and self._error is not None:
            raise self._error
        return event

    def pause_if_full(self, on_resume: Callable[[], None]) -> bool:
        """Pause the text if its reader is more than `MAX_UNREAD` chunks behind.

        Only a text that is being iterated: not one whose end somebody waits for.

        Args:
            on_resume: Called when the text should go on or was cancelled, in the thread of the reader.

        Returns:
            Whether the text pauses.
        """
        with self._changed:
            is_read_slowly = self._is_iterated and not self._is_awaited and not self.ended
            if is_read_slowly and len(self._events) > MAX_UNREAD:
                self._on_resume = on_resume
            return self.paused

    @property
    def paused(self) -> bool:
        """Whether the text pauses until its reader has read more."""
        return self._on_resume is not None

    def wait(self) -> GenerationResult | None:
        """The result, when the text has ended; None if it was cancelled. Raises its error."""
        self._await()
        with self._changed:
            while not self.ended:
                self._changed.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the text has ended, in the thread that ends it; now if it already has.

        An exception that it raises is logged.
        """
        self._await()
        with self._changed:
            if not self.ended:
                self._done_callbacks.append(callback)
                return
        _call(callback)

    def _await(self) -> None:
        with self._changed:
            self._is_awaited = True
        self._resume()

    def _resume(self) -> None:
        with self._changed:
            on_resume, self._on_resume = self._on_resume, None
        if on_resume is not None:
            on_resume()

    def _notify(self) -> None:
        self._changed.notify_all()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class TextStream(Iterator[GenerationChunk], AsyncIterator[GenerationChunk]):
    """The chunks of one text, as the engine generates them.

        for chunk in engine.submit(request):
            print(chunk.text, end="")

    Iterate in one thread, or with `async for` in one event loop. The other methods can be called from any thread.
    Dropping the stream cancels the text. If the loop falls behind by more than 1,000 chunks, the text pauses until it
    has caught up, unless its end is awaited: by `result`, `wait` or a done callback.
    """

    def __init__(self, channel: Channel, on_prefill: Callable[[int], None] | None = None):
        """Read what the engine passes to `channel`; see `Engine.submit`."""
        self._channel, self._on_prefill = channel, on_prefill
        self._chunks: list[GenerationChunk] = []  # that were iterated

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> GenerationChunk:
        while not isinstance(event := self._channel.take(), GenerationChunk):
            if event is None:
                raise StopIteration
            if self._on_prefill is not None:
                self._on_prefill(event)
        self._chunks.append(event)
        return event

    def __aiter__(self) -> TextStream:
        return self

    async def __anext__(self) -> GenerationChunk:
        loop = asyncio.get_running_loop()
        while True:
            changed = asyncio.Event()
            try:
                event = self._channel.take(_setter(loop, changed))
            except LookupError:
                await changed.wait()
                continue
            if event is None:
                raise StopAsyncIteration
            if isinstance(event, GenerationChunk):
                self._chunks.append(event)
                return event
            if self._on_prefill is not None:
                self._on_prefill(event)

    @property
    def seed(self) -> int:
        """The seed that the tokens are drawn with."""
        return self._channel.request.options.seed or 0

    @property
    def num_read(self) -> int:
        """How many tokens of the prompt were read so far, those in the cache included."""
        return self._channel.num_read

    @property
    def num_generated(self) -> int:
        """How many tokens were generated so far."""
        text = self._channel.text
        return 0 if text is None else len(text) - len(text.prompt)

    @property
    def done(self) -> bool:
        """Whether the text has ended: `result` doesn't wait."""
        return self._channel.ended

    def cancel(self) -> None:
        """Stop here. Iteration ends, and `result` is what was iterated. No effect if the last chunk was iterated."""
        if not (self._chunks and self._chunks[-1].finish_reason):
            self._channel.cancel()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the text has ended, in the thread that ends it; now if it already has.

        An exception that it raises is logged.
        """
        self._channel.add_done_callback(callback)

    def result(self) -> GenerationResult:
        """The whole text with its statistics, when it has ended; if it was cancelled, what was iterated.

        Raises:
            GenerationError: The text has failed.
        """
        whole = self._channel.wait()
        return whole if whole is not None and not self._channel.cancelled else self.partial_result()

    async def wait(self) -> GenerationResult:
        """`result`, for asyncio."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        self.add_done_callback(_setter(loop, ended))
        await ended.wait()
        return self.result()

    def partial_result(self) -> GenerationResult:
        """What has been iterated so far, with its statistics. Doesn't raise if the text has failed."""
        text, request, chunks = self._channel.text, self._channel.request, list(self._chunks)
        if chunks and chunks[-1].finish_reason:
            return self.result()
        if text is None:
            timings = Timings(None, None, None, mx.get_peak_memory())
            whole = GenerationResult("", [], len(request.prompt), 0, None, self.seed, timings)
        else:
            whole = text.result()
        return replace(
            whole,
            text="".join(chunk.text for chunk in chunks),
            tokens=[chunk.token for chunk in chunks],
            finish_reason=None,
            logprobs=None if request.options.logprobs is None else [c.logprob for c in chunks if c.logprob],
            constraint_error=None,
        )

    def __del__(self) -> None:
        self.cancel()


def _call(callback: Callable[[], None]) -> None:
    try:
        callback()
    except Exception:  # the other texts of the engine go on
        logger.exception("a done callback has failed")


def _setter(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> Callable[[], None]:
    """A function that sets an event of `loop` from any thread. No effect once the loop is closed."""

    def set_event() -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(event.set)

    return set_event
