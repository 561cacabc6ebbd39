"""One answer: its chunks while it is generated, and the turn that it becomes."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from mlxlm.chat.branches import Turn
from mlxlm.chat.chat_model import ChatModel
from mlxlm.chat.reasoning import ReasoningParser
from mlxlm.generation import FinishReason, GenerationChunk, GenerationResult, TextStream
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import GenerationError


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


def chat_chunks(chunks: Iterator[GenerationChunk], generation_prefix: str) -> Iterator[ChatChunk]:
    """Split reasoning from the answer in generated chunks.

    Args:
        chunks: The generated text.
        generation_prefix: What the template puts in front of the answer, such as an opening "<think>".

    Yields:
        At least one chunk for every generated chunk, so that a caller can stop between any two.
    """
    parser = ReasoningParser()
    parser.push(generation_prefix)
    for chunk in chunks:
        parts = parser.push(chunk.text)
        if chunk.finish_reason:
            parts += parser.finish()
        *first, (text, reasoning) = parts or [("", parser.reasoning)]
        for part in first:
            yield ChatChunk(*part)
        yield ChatChunk(text, reasoning, chunk.finish_reason)


def make_turn(question: str, prompt: Sequence[int], result: GenerationResult, chat_model: ChatModel) -> Turn:
    """Return the turn of an answer to `prompt`.

    It includes the template's `generation_prefix`: the model has read it, and a template that keeps reasoning renders
    it again.
    """
    generated = result.tokens[:-1] if result.tokens[-1] in chat_model.eos_token_ids else result.tokens
    tokenizer, generation_prefix = chat_model.lm.tokenizer, chat_model.chat_encoder.generation_prefix
    prefix_ids = tokenizer.encode(generation_prefix, add_special_tokens=False, parse_special=True, continues=True)
    text, ids = generation_prefix + result.text, (*prefix_ids, *generated)
    if list(prompt[len(prompt) - len(prefix_ids) :]) != prefix_ids or not decodes_to(tokenizer, ids, text):
        ids = ()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Turn(question, text, ids, result.seed, result.finish_reason, now)


def decodes_to(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> bool:
    """Whether `ids` decode to exactly this text: no stop string, partial character or special token besides."""
    return all(id < tokenizer.vocab_size for id in ids) and tokenizer.decode(ids, skip_special_tokens=False) == text
