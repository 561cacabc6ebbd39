"""The answers of a chat: the model that gives them, the chunks of one, and the turn that it becomes."""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from typing import TYPE_CHECKING

from mlxlm.cache import KVOptions
from mlxlm.cache.prefix_cache import common_prefix_length
from mlxlm.chat.chat_encoder import answer_eos_token_ids, chat_encoder
from mlxlm.chat.chat_template import PLAIN
from mlxlm.chat.history import Turn
from mlxlm.chat.messages import Message
from mlxlm.chat.reasoning import ReasoningParser
from mlxlm.chat.tool_calls import TextDelta, ToolCallParser, ToolCallStart, ToolEvent, ToolFormat
from mlxlm.chat.tool_grammar import constrain_calls
from mlxlm.generation import (
    Context,
    Engine,
    GenerationChunk,
    GenerationOptions,
    GenerationResult,
    LoadedModel,
    Request,
    TextStream,
)
from mlxlm.generation.context import UNLIMITED
from mlxlm.generation.request import max_new_tokens_for
from mlxlm.generation.result import ToolCall
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import GenerationError

if TYPE_CHECKING:
    from mlxlm.chat.tools import CallableTool
    from mlxlm.generation.sampling_functions import SamplingFunctions
    from mlxlm.generation.speculative import SpeculativeDecoder


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


class ChatModel:
    """A model with everything that changes when a chat switches to another one.

    Attributes:
        engine: Generates the answers, and keeps what was read.
        defaults: The generation options of a new chat.
        limit: Tokens of a conversation, its answer included; more than `UNLIMITED` with a rotating cache.
        eos_token_ids: Tokens that end an answer.
        tools: The tools that an answer may call, by their names.
        functions: The caller's functions that take part in sampling.
    """

    def __init__(
        self,
        lm: LoadedModel,
        chat_template: str | None,
        kv: KVOptions,
        speculation: SpeculativeDecoder | None,
        tools: Mapping[str, CallableTool],
        functions: SamplingFunctions | None,
    ):
        """Raise TokenizerError for a bad chat template, GenerationError for cache settings this model can't use."""
        self.tools, self.functions = tools, functions
        self.lm, self.requested_chat_template = lm, chat_template
        self.chat_encoder = chat_encoder(lm.tokenizer, lm.eos_token_ids, chat_template)
        self.limit = 1 + max_new_tokens_for(lm, [0], kv)
        self.engine = Engine(lm, kv=kv, speculation=speculation)
        self._drops_tokens = Context(lm.model, kv).drops_tokens
        self.eos_token_ids = answer_eos_token_ids(lm, self.chat_encoder)
        self.defaults = lm.generation_options()
        if self.chat_encoder.name != PLAIN:
            self.defaults = replace(self.defaults, max_tokens=None)

    @property
    def context_size(self) -> int:
        """Tokens that the model can see: its context, or the size of a rotating cache."""
        return min(self.limit, self.engine.kv.size or UNLIMITED)

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model writes calls, if there are tools."""
        return self.chat_encoder.tool_format if self.tools else None

    def check(self, options: GenerationOptions) -> None:
        """Raise GenerationError for options that this model can't use, alone or with the tools."""
        options = self._constrain(options, may_call=True)
        request = Request([0], options, self.eos_token_ids, functions=self.functions)
        request.check(self.lm, self.engine.kv)
        request.compile_grammar(self.lm)

    @cached_property
    def answer_start(self) -> Message:
        """What the template puts at the start of an answer, such as an opening "<think>"."""
        text = self.chat_encoder.generation_prefix
        ids = self.lm.tokenizer.encode(text, add_special_tokens=False, parse_special=True, continues=True)
        return Message("assistant", text, tuple(ids))

    def encode(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, continue_final_message: bool = False
    ) -> list[int]:
        """Return the token ids of a conversation with the tools. See `ChatTemplate.render`."""
        return self.chat_encoder.encode(
            messages,
            tools=[tool.to_dict() for tool in self.tools.values()],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def prompt(
        self, earlier: Sequence[Message], question: str, steps: Sequence[Message] = (), answer: Message | None = None
    ) -> list[int]:
        """Return the token ids of a conversation, a question and its steps, up to where the answer starts.

        With `answer` they end with its text, which the model continues. Raises TokenizerError if the template doesn't
        end with it.
        """
        messages = [*earlier, Message("user", question), *steps]
        if answer is None:
            return self.encode(messages)
        return self.encode([*messages, answer], continue_final_message=True)

    def answer(
        self,
        earlier: Sequence[Message],
        prompt: Sequence[int],
        options: GenerationOptions,
        on_prefill: Callable[[int], None] | None,
        may_call: bool,
    ) -> TextStream:
        """Start the answer to `prompt`, a question after `earlier` messages, which may call the tools or not."""
        question = common_prefix_length(prompt, self.prompt(earlier, "")) if self._drops_tokens else None
        if options.seed is not None:
            options = options.with_seed(options.seed)  # deterministic answers read the whole conversation again
        options = self._constrain(options, may_call)
        request = Request(prompt, options, self.eos_token_ids, question, self.functions)
        return self.engine.submit(request, on_prefill=on_prefill)

    def _constrain(self, options: GenerationOptions, may_call: bool) -> GenerationOptions:
        return constrain_calls(
            options,
            list(self.tools.values()),
            self.chat_encoder,
            self.lm.tokenizer,
            self.answer_start.content,
            tool_choice="auto" if may_call else "none",
        )

    def turn(self, question: str, prompt: Sequence[int], start: Message, result: GenerationResult) -> Turn:
        """Return the turn of a question with its answer, which begins with `start`, the end of `prompt`.

        The model has read that, and a template that keeps reasoning renders it again.
        """
        generated = result.tokens[:-1] if result.tokens[-1] in self.eos_token_ids else result.tokens
        text, ids = start.content + result.text, (*start.ids, *generated)
        was_read = tuple(prompt[len(prompt) - len(start.ids) :]) == start.ids
        if not was_read or not decodes_to(self.lm.tokenizer, ids, text):
            ids = ()
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return Turn(question, text, ids, result.seed, result.finish_reason, now)


def edited_answer(answer: Message, text: str, tokenizer: Tokenizer) -> Message:
    """Return an answer with another text. It keeps its tokens up to the change, which the model has read already."""
    if text == answer.content:
        return answer

    def is_changed(count: int) -> bool:
        return not text.startswith(tokenizer.decode(answer.ids[:count], skip_special_tokens=False))

    kept = answer.ids[: max(0, bisect_left(range(len(answer.ids) + 1), True, key=is_changed) - 1)]
    rest = text.removeprefix(tokenizer.decode(kept, skip_special_tokens=False))
    ids = (*kept, *tokenizer.encode(rest, add_special_tokens=False, continues=bool(kept)))
    return Message("assistant", text, ids if kept and decodes_to(tokenizer, ids, text) else ())


def decodes_to(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> bool:
    """Whether `ids` decode to exactly this text: no stop string, partial character or special token in addition."""
    return all(id < tokenizer.vocab_size for id in ids) and tokenizer.decode(ids, skip_special_tokens=False) == text
