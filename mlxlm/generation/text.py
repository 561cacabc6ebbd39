"""A text from its submission to its end: tokens, sampler, detokenizer, stop strings, events for its reader, result."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from itertools import count

from mlxlm.backend.mlx import mx
from mlxlm.cache import KVOptions
from mlxlm.generation.context import UNLIMITED
from mlxlm.generation.decoding import Row
from mlxlm.generation.gumbel_noise import random_seed
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.generation.request import Request
from mlxlm.generation.result import (
    FinishReason,
    GenerationChunk,
    GenerationResult,
    SpeculationStats,
    Timings,
    TokenLogprobs,
)
from mlxlm.generation.sampling import Sampler
from mlxlm.generation.stop_strings import StopStrings
from mlxlm.utils.errors import MlxlmError

MAX_UNREAD = 1000  # chunks that wait for a slow reader; with more, the text pauses
_RESUME_UNREAD = MAX_UNREAD // 2  # with fewer, it goes on

logger = logging.getLogger(__name__)


class Text(Row):
    """One text of an engine.

    The engine's thread appends tokens and ends it. Its reader, in any other thread, takes the chunks that this gives,
    through a `TextStream`. What the two share is changed with the lock `_changed`.

    Attributes:
        request: The request, with its seed.
        number: Later texts have larger numbers.
        num_read: How many tokens of the prompt were read so far, those in the cache included.
        num_cached: How many tokens of the prompt didn't have to be read.
        is_counted: Whether the statistics of the engine include its prompt.
        speculation: The statistics of speculative decoding, if it is used.
        cancelled: Whether the reader no longer wants the text.
        ended: Whether the text is complete, has failed, or was cancelled: its reader gets no more.
        taken: The chunks that the reader has taken.
        whole: The result, at the end of the text.
    """

    _numbers = count()

    def __init__(self, lm: LoadedModel, request: Request, kv: KVOptions, max_length: int = UNLIMITED):
        """Prepare a text of at most `max_length` tokens with its prompt. `prepare_sampler` must follow.

        Raises:
            GenerationError: For a prompt or options that this model or its tokenizer can't serve.
        """
        room, options = min(request.check(lm, kv), max_length - len(request.prompt)), request.options
        if options.seed is None:
            options = options.with_seed(random_seed())
        super().__init__(request.prompt, room if options.max_tokens is None else min(room, options.max_tokens))
        self.request, self.number = replace(request, options=options), next(self._numbers)
        self.num_read = self.num_cached = 0
        self.is_counted = self.cancelled = self.ended = False
        self.speculation: SpeculationStats | None = None
        self.taken: list[GenerationChunk] = []

        self._limit_reason: FinishReason = "length" if self.limit == options.max_tokens else "context"
        self._eos_token_ids = lm.eos_token_ids if request.eos_token_ids is None else request.eos_token_ids
        # Special tokens that a grammar asks for, such as the markup of tool calls, are part of the text.
        self._tokenizer = lm.tokenizer
        self._skip_special_tokens = request.skip_special_tokens and options.grammar is None
        self._detokenizer = lm.tokenizer.detokenizer(skip_special_tokens=self._skip_special_tokens)
        self._stop_strings = StopStrings(options.stop)
        self._empty = True  # no token has added a byte yet
        self._content = StringIO()
        self._logprobs: list[TokenLogprobs] | None = None if options.logprobs is None else []
        self._finish_reason: FinishReason | None = None
        self._start_time = self._last_token_time = time.perf_counter()
        self._first_token_time: float | None = None
        self._queue_seconds: float | None = None

        self._changed = threading.Condition()
        self._events: deque[GenerationChunk | int] = deque()  # chunks, and numbers of prompt tokens read
        self.whole: GenerationResult | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []  # at the next change
        self._done_callbacks: list[Callable[[], None]] = []
        self._is_awaited = False  # whether somebody waits for the end
        self._on_resume: Callable[[], None] | None = None  # while the text pauses

    @property
    def deterministic(self) -> bool:
        """Whether the text depends on nothing but its request."""
        return self.request.options.is_deterministic

    def prepare_sampler(self, lm: LoadedModel) -> None:
        """Compile the constraint, if there is one, and make the sampler. Raises as `Grammar.compile`."""
        options = self.request.options
        grammar = None if self.cancelled else self.request.compile_grammar(lm)
        self.sampler = Sampler(
            options,
            self.prompt,
            options.seed or 0,
            tokenizer=lm.tokenizer,
            grammar=grammar,
            eos_token_ids=self._eos_token_ids,
            functions=self.request.functions,
        )

    def begin(self) -> None:
        """Restart the clock of the timings, unless there are tokens: then the text was interrupted."""
        if not self.tokens:
            now = time.perf_counter()
            if self._queue_seconds is None:
                self._queue_seconds = now - self._start_time
            self._start_time = now

    def set_num_cached(self, num_cached: int) -> None:
        """Note how many tokens of the prompt didn't have to be read, unless the text was only interrupted."""
        if not self.tokens:
            self.num_cached = min(num_cached, len(self.prompt) - 1)
            self.report_read(num_cached)

    def report_read(self, num_tokens: int) -> None:
        """Tell the reader how many tokens of the prompt were read so far."""
        self.num_read = num_tokens
        self._push(num_tokens)

    def accept(self, token: int) -> None:
        """Append a token that `sampler` drew. The reader gets its chunk; an error ends this text alone."""
        try:
            self.sampler.accept(token)
            chunk = self._append(token)
        except MlxlmError as error:
            self.fail(error)
            return
        self._push(chunk)
        if chunk.finish_reason is not None:
            self.finished, self.whole = True, self.so_far()
            self._end()

    def fail(self, error: BaseException) -> None:
        """End the text with an error."""
        self.finished = True
        self._end(error)

    def pause_if_full(self, on_resume: Callable[[], None]) -> bool:
        """Pause the text if its reader is more than `MAX_UNREAD` chunks behind.

        Only a text that is being iterated: not one whose end somebody waits for.

        Args:
            on_resume: Called when the text should go on or was cancelled, in the thread of the reader.

        Returns:
            Whether the text pauses.
        """
        with self._changed:
            is_read_slowly = bool(self.taken) and not self._is_awaited and not self.ended
            if is_read_slowly and len(self._events) > MAX_UNREAD:
                self._on_resume = on_resume
            return self.paused

    @property
    def paused(self) -> bool:
        """Whether the text pauses until its reader has read more."""
        return self._on_resume is not None

    # What both sides use; `TextStream` is the reader's.

    def _push(self, event: GenerationChunk | int) -> None:
        with self._changed:
            if not self.ended:
                self._events.append(event)
            self._notify()

    def _end(self, error: BaseException | None = None) -> None:
        with self._changed:
            if self.ended:
                return
            self.ended, self._error = True, error
            self._notify()
            callbacks, self._done_callbacks = self._done_callbacks, []
        self._resume()
        for callback in callbacks:
            _call(callback)

    def _notify(self) -> None:
        self._changed.notify_all()
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def _resume(self) -> None:
        with self._changed:
            on_resume, self._on_resume = self._on_resume, None
        if on_resume is not None:
            on_resume()

    # Tokens become text.

    def _append(self, token: int) -> GenerationChunk:
        """Append a token. A chunk with a `finish_reason` is the last one."""
        self._last_token_time = time.perf_counter()
        self._first_token_time = self._first_token_time or self._last_token_time
        self.tokens.append(token)
        logprob = self.sampler.pop_logprobs(self._added_bytes)
        if self._logprobs is not None and logprob is not None:
            self._logprobs.append(logprob)
        is_eos, may_end = token in self._eos_token_ids, len(self.tokens) > self.request.options.min_tokens
        self._empty = self._empty and (is_eos or not self._token_bytes(token))
        text = "" if is_eos else self._stop_strings.push(self._detokenizer.add_token(token), may_end)
        reason = self._reason_after(is_eos and may_end)
        if reason:
            text += self._stop_strings.push(self._detokenizer.finalize(), may_end)
            text += self._stop_strings.flush()
        self._finish_reason = "stop" if self._stop_strings.matched else reason
        self._content.write(text)
        return GenerationChunk(text, token, self._finish_reason, logprob)

    def _reason_after(self, is_end: bool) -> FinishReason | None:
        """Why the text ends with its last token, an end token or not, if it does and not by a stop string."""
        matcher = self.sampler.matcher
        if is_end or matcher is not None and matcher.finished:
            return "eos"
        if matcher is not None and matcher.error:
            return "constraint"
        return self._limit_reason if self.remaining <= 0 else None

    def _added_bytes(self, token: int) -> bytes | None:
        """The bytes that a token adds to the text here; None if the tokenizer's tokens aren't bytes."""
        if not self._tokenizer.has_byte_tokens:
            return None
        added = b"" if token in self._eos_token_ids else self._token_bytes(token)
        return added.removeprefix(b" ") if self._empty and self._tokenizer.strips_dummy_prefix else added

    def _token_bytes(self, token: int) -> bytes:
        return self._tokenizer.token_bytes(token, skip_special_tokens=self._skip_special_tokens)

    def so_far(self) -> GenerationResult:
        """All that was generated so far, with its statistics."""
        return GenerationResult(
            text=self._content.getvalue(),
            tokens=self.tokens.tolist(),
            prompt_tokens=len(self.prompt),
            cached_tokens=self.num_cached,
            finish_reason=self._finish_reason,
            seed=self.request.options.seed or 0,
            timings=self._timings(),
            logprobs=None if self._logprobs is None else list(self._logprobs),
            constraint_error=self._constraint_error(),
            speculation=self.speculation,
        )

    def _constraint_error(self) -> str | None:
        if self._finish_reason is None or (matcher := self.sampler.matcher) is None:
            return None
        if self._finish_reason == "stop":
            return matcher.constraint_error_of(self._content.getvalue())
        return matcher.constraint_error

    def _timings(self) -> Timings:
        peak = mx.get_peak_memory()
        if self._first_token_time is None:
            return Timings(None, None, None, peak, self._queue_seconds)
        to_first = self._first_token_time - self._start_time
        decoding = self._last_token_time - self._first_token_time
        return Timings(
            time_to_first_token=to_first,
            prompt_tokens_per_second=(len(self.prompt) - self.num_cached) / to_first,
            tokens_per_second=(len(self.tokens) - 1) / decoding if decoding else None,
            peak_memory_bytes=peak,
            queue_seconds=self._queue_seconds,
        )


def _call(callback: Callable[[], None]) -> None:
    try:
        callback()
    except Exception:  # the other texts of the engine go on
        logger.exception("a done callback has failed")


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
        while not isinstance(event := self._take(), GenerationChunk):
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
                event = self._take(_setter(loop, changed))
            except LookupError:
                await changed.wait()
                continue
            if event is None:
                raise StopAsyncIteration
            if isinstance(event, GenerationChunk):
                return event
            if self._on_prefill is not None:
                self._on_prefill(event)

    def _take(self, on_change: Callable[[], None] | None = None) -> GenerationChunk | int | None:
        """The next chunk, or number of prompt tokens read; None at the end. Waits for it, unless `on_change` is given.

        Raises:
            LookupError: There is none yet; `on_change` will be called when there is.
            Exception: The text has failed.
        """
        text = self._text
        with text._changed:
            while not text._events and not text.ended:
                if on_change is not None:
                    text._callbacks.append(on_change)
                    raise LookupError
                text._changed.wait()
            event = text._events.popleft() if text._events else None
            if isinstance(event, GenerationChunk):
                text.taken.append(event)
            has_room = len(text._events) < _RESUME_UNREAD
        if has_room:
            text._resume()
        if event is None and text._error is not None:
            raise text._error
        return event

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
        text = self._text
        if not self._all_taken:
            with text._changed:
                text.cancelled = True
                text._events.clear()
            text._end()

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the text has ended, in the thread that ends it; now if it already has.

        An exception that it raises is logged.
        """
        text = self._text
        with text._changed:
            text._is_awaited, ended = True, text.ended
            if not ended:
                text._done_callbacks.append(callback)
        text._resume()
        if ended:
            _call(callback)

    def result(self) -> GenerationResult:
        """The whole text with its statistics, when it has ended; if it was cancelled, what was iterated.

        Raises:
            GenerationError: The text has failed.
        """
        text, ended = self._text, threading.Event()
        self.add_done_callback(ended.set)
        ended.wait()
        if text._error is not None:
            raise text._error
        return self.partial_result() if text.whole is None or text.cancelled else text.whole

    async def wait(self) -> GenerationResult:
        """`result`, for asyncio."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        self.add_done_callback(_setter(loop, ended))
        await ended.wait()
        return self.result()

    def partial_result(self) -> GenerationResult:
        """What has been iterated so far, with its statistics. Doesn't raise if the text has failed."""
        taken = self._text.taken
        if self._all_taken:
            return self.result()
        whole = self._text.so_far()
        return replace(
            whole,
            text="".join(chunk.text for chunk in taken),
            tokens=whole.tokens[: len(taken)],
            finish_reason=None,
            logprobs=None if whole.logprobs is None else [chunk.logprob for chunk in taken if chunk.logprob],
            constraint_error=None,
        )

    @property
    def _all_taken(self) -> bool:
        taken = self._text.taken
        return bool(taken) and taken[-1].finish_reason is not None

    def __del__(self) -> None:
        self.cancel()


def _setter(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> Callable[[], None]:
    """A function that sets an event of `loop` from any thread. No effect once the loop is closed."""

    def set_event() -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(event.set)

    return set_event
