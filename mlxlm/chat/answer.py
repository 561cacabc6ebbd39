"""One answer: its pieces as they come, the turn that it makes of a conversation, the statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from mlxlm.chat.branches import Turn
from mlxlm.chat.chat_model import Reader
from mlxlm.chat.reasoning import Splitter
from mlxlm.generation import Chunk, FinishReason, Result
from mlxlm.tokenizer import Tokenizer


@dataclass(frozen=True)
class Piece:
    """A stretch of an answer, or "" where a token decides no text. `thinking`: it is reasoning, not yet the answer.

    `finish_reason` is set on the last piece only.
    """

    text: str
    thinking: bool
    finish_reason: FinishReason | None = None


@dataclass(frozen=True)
class Stats:
    """What a chat has cost since it was made or opened: answers drawn, those undone included, and their tokens; `last`
    is the last of them. The caches have `cache_bytes`."""

    answers: int
    generated_tokens: int
    cache_bytes: int
    last: Result | None


def pieces(chunks: Iterator[Chunk], opening: str) -> Iterator[Piece]:
    """The pieces of an answer that begins with `opening`; at least one for every chunk, so that a caller can stop."""
    splitter = Splitter()
    splitter.push(opening)
    for chunk in chunks:
        parts = splitter.push(chunk.text)
        if chunk.finish_reason:
            parts += splitter.finish()
        *before, (text, thinking) = parts or [("", splitter.thinking)]
        for part in before:
            yield Piece(*part)
        yield Piece(text, thinking, chunk.finish_reason)


def turn_of(question: str, prompt: Sequence[int], result: Result, reader: Reader) -> Turn:
    """The turn that an answer to `prompt` makes. What the template opened for it (`Transcript.opening`) is part of it:
    the model has read it, and a template that keeps reasoning renders it again.
    """
    said = result.tokens[:-1] if result.tokens[-1] in reader.end_ids else result.tokens
    tokenizer, opening = reader.loaded.tokenizer, reader.transcript.opening
    opened = tokenizer.encode(opening, add_special_tokens=False, parse_special=True, continues=True)
    text, ids = opening + result.text, (*opened, *said)
    if list(prompt[len(prompt) - len(opened) :]) != opened or not spells(tokenizer, ids, text):
        ids = ()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Turn(question, text, ids, result.seed, result.finish_reason, now)


def spells(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> bool:
    """Whether `ids` say this text and nothing else: no stop string behind it, no half character, no special token."""
    return all(id < tokenizer.vocab_size for id in ids) and tokenizer.decode(ids, skip_special_tokens=False) == text
