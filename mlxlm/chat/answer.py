"""The answers of a chat: their chunks, and how they are stopped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator, Iterator
from dataclasses import dataclass, replace

from mlxlm.chat.answer_parser import AnswerParser
from mlxlm.generation import (
    GenerationChunk,
    GenerationResult,
    TextStream,
)
from mlxlm.utils.errors import GenerationError


@dataclass(frozen=True)
class ChatStats:
    """Statistics since a chat was created or opened.

    Attributes:
        answers: Answers generated, those undone included.
        generated_tokens: Tokens of these answers.
        cache_bytes: Size of the key-value caches.
        last: The last answer.
    """

    answers: int
    generated_tokens: int
    cache_bytes: int
    last: GenerationResult | None


class Cancellation:
    """Cancels the stream of an answer from any thread, also one that is only about to begin."""

    def __init__(self) -> None:
        self._cancelled = False
        self.stream: TextStream | None = None

    def attach(self, stream: TextStream) -> None:
        """Let `cancel` cancel this stream."""
        self.stream = stream
        if self._cancelled:
            stream.cancel()

    def cancel(self) -> None:
        """Cancel the stream."""
        self._cancelled = True
        if self.stream is not None:
            self.stream.cancel()


class Answer(Iterator[GenerationChunk], AsyncIterator[GenerationChunk]):
    """The chunks of an answer, as they are generated. Iterate in one thread, or with `async for`."""

    def __init__(self, chunks: Generator[GenerationChunk, None, None], cancellation: Cancellation):
        """Iterate `chunks`, which `cancellation` ends."""
        self._chunks, self._cancellation = chunks, cancellation
        self._lock = threading.RLock()
        self._texts: list[str] = []
        self._before_calls = False  # whether calls came after the last text

    def __iter__(self) -> Answer:
        return self

    def __next__(self) -> GenerationChunk:
        with self._lock:
            chunk = next(self._chunks)
            if chunk.tool_call is not None:
                self._before_calls = bool(self._texts)
            elif chunk.text and not chunk.reasoning:
                self._texts += ["\n\n", chunk.text] if self._before_calls else [chunk.text]
                self._before_calls = False
            return chunk

    def __aiter__(self) -> Answer:
        return self

    async def __anext__(self) -> GenerationChunk:
        try:
            chunk = await asyncio.to_thread(next, self, None)
        except asyncio.CancelledError:
            self._cancellation.cancel()
            raise
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    @property
    def text(self) -> str:
        """The whole answer without its reasoning, when it has ended; what there is of it if it was closed.

        Texts before and after calls are paragraphs.
        """
        for _ in self:
            pass
        return "".join(self._texts)

    def result(self) -> GenerationResult:
        """What the model wrote, reasoning included, with its statistics, when it has ended.

        If tools were called, it is the text after the last calls.

        Raises:
            GenerationError: The answer was closed before it began.
        """
        for _ in self:
            pass
        if self._cancellation.stream is None:
            raise GenerationError("the answer was closed before it began", "the message again")
        return self._cancellation.stream.partial_result()

    async def wait(self) -> GenerationResult:
        """`result`, for asyncio."""
        async for _ in self:
            pass
        return self.result()

    def close(self) -> None:
        """Stop the answer, from any thread: the iteration ends, and the text so far is in the conversation.

        Raises:
            GenerationError: From within a callback of the answer.
        """
        if not self._lock.acquire(blocking=False):  # another thread is in `__next__`
            self._cancellation.cancel()
            self._lock.acquire()
        try:
            self._chunks.close()
        except ValueError:  # this thread is in `__next__`
            raise GenerationError("the chat can't be changed from within its answer", "after it") from None
        finally:
            self._lock.release()


def parsed_chunks(parser: AnswerParser, chunk: GenerationChunk) -> list[GenerationChunk]:
    """Return what a generated chunk adds to an answer, without calls.

    It is at least one chunk, so that a caller can stop between any two tokens.
    """
    pieces = parser.push(chunk.text, chunk.finish_reason)
    shown = [(piece.text, piece.part.kind == "reasoning") for piece in pieces if piece.part.kind != "call"]
    *first, (text, reasoning) = shown or [("", parser.in_reasoning)]
    chunks = [GenerationChunk(text, reasoning=reasoning) for text, reasoning in first]
    return [*chunks, replace(chunk, text=text, reasoning=reasoning)]
