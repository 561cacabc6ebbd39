"""One answer: its pieces as they come, the turn that it makes of a conversation, the statistics."""

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
    """A stretch of an answer, or "" where a token decides no text. `reasoning`: it is reasoning, not yet the answer.

    `finish_reason` is set on the last piece only.
    """

    text: str
    reasoning: bool
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class ChatStats:
    """What a chat has cost since it was made or opened: answers drawn, those undone included, and their tokens; `last`
    is the last of them. The caches have `cache_bytes`."""

    answers: int
    generated_tokens: int
    cache_bytes: int
    last: GenerationResult | None


def chat_chunks(chunks: Iterator[GenerationChunk], generation_prefix: str) -> Iterator[ChatChunk]:
    """The pieces of an answer that begins with `generation_prefix`; at least one for every chunk, so that a caller can stop."""
    parser = ReasoningParser()
    parser.push(generation_prefix)
    for chunk in chunks:
        parts = parser.push(chunk.text)
        if chunk.finish_reason:
            parts += parser.finish()
        *before, (text, reasoning) = parts or [("", parser.reasoning)]
        for part in before:
            yield ChatChunk(*part)
        yield ChatChunk(text, reasoning, chunk.finish_reason)


def make_turn(question: str, prompt: Sequence[int], result: GenerationResult, chat_model: ChatModel) -> Turn:
    """The turn that an answer to `prompt` makes. What the template opened for it (`ChatEncoder.generation_prefix`) is part of it:
    the model has read it, and a template that keeps reasoning renders it again.
    """
    said = result.tokens[:-1] if result.tokens[-1] in chat_model.eos_token_ids else result.tokens
    tokenizer, generation_prefix = chat_model.lm.tokenizer, chat_model.chat_encoder.generation_prefix
    opened = tokenizer.encode(generation_prefix, add_special_tokens=False, parse_special=True, continues=True)
    text, ids = generation_prefix + result.text, (*opened, *said)
    if list(prompt[len(prompt) - len(opened) :]) != opened or not decodes_to(tokenizer, ids, text):
        ids = ()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Turn(question, text, ids, result.seed, result.finish_reason, now)


def decodes_to(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> bool:
    """Whether `ids` say this text and nothing else: no stop string behind it, no half character, no special token."""
    return all(id < tokenizer.vocab_size for id in ids) and tokenizer.decode(ids, skip_special_tokens=False) == text
