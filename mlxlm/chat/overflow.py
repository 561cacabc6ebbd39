"""A conversation that has outgrown the model's context: when that is, and which turns go."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Literal, get_args

from mlxlm.chat.branches import Conversation
from mlxlm.errors import GenerationError

Overflow = Literal["stop", "drop"]


class ContextFull(GenerationError):
    """The model's context has no room for a message and an answer."""


def check_overflow(policy: str) -> Overflow:
    """Raises GenerationError for what isn't a policy."""
    if policy not in get_args(Overflow):
        raise GenerationError(f"overflow is {policy!r}", " or ".join(get_args(Overflow)))
    return policy


def room_for_answer(size: int, max_tokens: int | None) -> int:
    """Tokens that "drop" keeps free for the next answer: as many as it may have, and no more than a quarter of the
    context."""
    return min(size // 4, size if max_tokens is None else max_tokens)


def shortened(conversation: Conversation, length: Callable[[Conversation], int], size: int) -> Conversation:
    """`conversation` without its oldest turns, as many as it takes for it to have at most `size // 2` tokens; without
    all of them where that isn't enough.

    What stays is read again, as its positions are others behind the system message: with a half kept, once for every
    half context of new text, so each token about twice; with three quarters kept it would be four times.
    `length` tells the tokens of a conversation, and falls with every turn that goes.
    """
    turns = range(len(conversation.seen) + 1)
    n = bisect_left(turns, True, key=lambda n: n == turns[-1] or length(conversation.without_oldest(n)) <= size // 2)
    return conversation.without_oldest(n)
