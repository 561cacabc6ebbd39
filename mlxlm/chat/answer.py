"""One answer: its chunks while it is generated, and the turn that it becomes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from mlxlm.chat.branches import Turn
from mlxlm.chat.chat_model import ChatModel
from mlxlm.chat.reasoning import ReasoningParser
from mlxlm.generation import FinishReason, GenerationChunk, GenerationResult
from mlxlm.tokenizer import Tokenizer


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
