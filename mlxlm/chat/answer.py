"""The answers of a chat: their chunks, their parts, and how they are stopped."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mlxlm.chat.reasoning import ReasoningParser
from mlxlm.chat.tool_calls import TextDelta, ToolCallParser, ToolCallStart, ToolEvent, ToolFormat
from mlxlm.generation import (
    GenerationChunk,
    GenerationResult,
    TextStream,
)
from mlxlm.generation.result import ToolCall
from mlxlm.utils.errors import GenerationError

if TYPE_CHECKING:
    pass


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


class AnswerParser:
    """Splits a generated answer into reasoning, text and tool calls.

    Attributes:
        reasoning: The reasoning so far.
        text: The text so far, without reasoning and calls.
        calls: The calls so far; the arguments of the last one can be incomplete.
    """

    def __init__(self, start: str, tool_format: ToolFormat | None):
        """Parse an answer that begins with `start`, such as an opening "<think>" of the template."""
        self.reasoning = self.text = ""
        self.calls: list[ToolCall] = []
        self._reasoning = ReasoningParser()
        self._tool_calls = None if tool_format is None else ToolCallParser(tool_format)
        self._add(self._reasoning.push(start))

    def push(self, chunk: GenerationChunk) -> list[GenerationChunk]:
        """Return what a generated chunk adds: at least one chunk, so that a caller can stop between any two."""
        parts = self._reasoning.push(chunk.text)
        if chunk.finish_reason:
            parts += self._reasoning.finish()
        shown = self._add(parts)
        if chunk.finish_reason and self._tool_calls is not None:
            cut_off = chunk.finish_reason not in ("eos", "stop")
            shown += self._add_events(self._tool_calls.finish(cut_off=cut_off))
        *first, (text, reasoning) = shown or [("", self._reasoning.reasoning)]
        chunks = [GenerationChunk(text, reasoning=reasoning) for text, reasoning in first]
        return [*chunks, replace(chunk, text=text, reasoning=reasoning)]

    def _add(self, parts: Sequence[tuple[str, bool]]) -> list[tuple[str, bool]]:
        """Add pairs of text and whether it is reasoning; return them without calls."""
        shown: list[tuple[str, bool]] = []
        for text, reasoning in parts:
            if reasoning:
                self.reasoning += text
                shown.append((text, True))
            elif self._tool_calls is not None:
                shown += self._add_events(self._tool_calls.push(text))
            else:
                self.text += text
                shown.append((text, False))
        return shown

    def _add_events(self, events: Sequence[ToolEvent]) -> list[tuple[str, bool]]:
        shown = []
        for event in events:
            if isinstance(event, TextDelta):
                self.text += event.text
                shown.append((event.text, False))
            elif isinstance(event, ToolCallStart):
                self.calls.append(ToolCall(event.id, event.name, ""))
            else:
                self.calls[-1] = replace(self.calls[-1], arguments=self.calls[-1].arguments + event.text)
        return shown
