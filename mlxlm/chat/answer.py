"""The answers of a chat: the model that gives them, the chunks of one, and the turn that it becomes."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterator, Sequence
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
from mlxlm.generation import (
    Context,
    Engine,
    FinishReason,
    GenerationChunk,
    GenerationOptions,
    GenerationResult,
    LoadedModel,
    Request,
    TextStream,
)
from mlxlm.generation.context import UNLIMITED
from mlxlm.generation.request import max_new_tokens_for
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import GenerationError

if TYPE_CHECKING:
    from mlxlm.generation.speculative import SpeculativeDecoder


@dataclass(frozen=True)
class ChatChunk:
    """A piece of an answer.

    Attributes:
        text: New text; "" for a token that completes no character.
        reasoning: Whether the text is reasoning rather than the answer.
        finish_reason: Set in the last chunk only.
    """

    text: str
    reasoning: bool
    finish_reason: FinishReason | None = None


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
        self._stream: TextStream | None = None

    def attach(self, stream: TextStream) -> None:
        """Let `cancel` cancel this stream."""
        self._stream = stream
        if self._cancelled:
            stream.cancel()

    def cancel(self) -> None:
        """Cancel the stream."""
        self._cancelled = True
        if self._stream is not None:
            self._stream.cancel()


class Answer(Iterator[ChatChunk]):
    """The chunks of an answer, as they are generated. Iterate in one thread."""

    def __init__(self, chunks: Generator[ChatChunk, None, None], cancellation: Cancellation):
        """Iterate `chunks`, which `cancellation` ends."""
        self._chunks, self._cancellation = chunks, cancellation
        self._lock = threading.RLock()

    def __next__(self) -> ChatChunk:
        with self._lock:
            return next(self._chunks)

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


def chat_chunks(chunks: Iterator[GenerationChunk], start: str) -> Iterator[ChatChunk]:
    """Split reasoning from the answer in generated chunks.

    Args:
        chunks: The generated text.
        start: The text of the answer before them, such as an opening "<think>" of the template.

    Yields:
        At least one chunk for every generated chunk, so that a caller can stop between any two.
    """
    parser = ReasoningParser()
    parser.push(start)
    for chunk in chunks:
        parts = parser.push(chunk.text)
        if chunk.finish_reason:
            parts += parser.finish()
        *first, (text, reasoning) = parts or [("", parser.reasoning)]
        for part in first:
            yield ChatChunk(*part)
        yield ChatChunk(text, reasoning, chunk.finish_reason)


class ChatModel:
    """A model with everything that changes when a chat switches to another one.

    Attributes:
        engine: Generates the answers, and keeps what was read.
        defaults: The generation options of a new chat.
        limit: Tokens of a conversation, its answer included; more than `UNLIMITED` with a rotating cache.
        eos_token_ids: Tokens that end an answer.
    """

    def __init__(
        self, lm: LoadedModel, chat_template: str | None, kv: KVOptions, speculation: SpeculativeDecoder | None
    ):
        """Raise TokenizerError for a bad chat template, GenerationError for cache settings this model can't use."""
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

    def check(self, options: GenerationOptions) -> None:
        """Raise GenerationError for options that this model can't use."""
        request = Request([0], options, self.eos_token_ids)
        request.check(self.lm, self.engine.kv)
        request.compile_grammar(self.lm)

    @cached_property
    def answer_start(self) -> Message:
        """What the template puts at the start of an answer, such as an opening "<think>"."""
        text = self.chat_encoder.generation_prefix
        ids = self.lm.tokenizer.encode(text, add_special_tokens=False, parse_special=True, continues=True)
        return Message("assistant", text, tuple(ids))

    def prompt(self, earlier: Sequence[Message], question: str, answer: Message | None = None) -> list[int]:
        """Return the token ids of a conversation and a question, up to where the answer starts.

        With `answer` they end with its text, which the model continues. Raises TokenizerError if the template doesn't
        end with it.
        """
        messages = [*earlier, Message("user", question)]
        if answer is None:
            return self.chat_encoder.encode(messages)
        return self.chat_encoder.encode([*messages, answer], continue_final_message=True)

    def answer(
        self,
        earlier: Sequence[Message],
        prompt: Sequence[int],
        options: GenerationOptions,
        on_prefill: Callable[[int], None] | None,
    ) -> TextStream:
        """Start the answer to `prompt`, a question after `earlier` messages."""
        question = common_prefix_length(prompt, self.prompt(earlier, "")) if self._drops_tokens else None
        if options.seed is not None:
            options = options.with_seed(options.seed)  # deterministic answers read the whole conversation again
        return self.engine.submit(Request(prompt, options, self.eos_token_ids, question), on_prefill=on_prefill)

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
