"""A conversation that has outgrown the model's context: when that is, and which turns go."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Literal, get_args

from mlxlm.chat.branches import Conversation
from mlxlm.utils.errors import GenerationError

ContextOverflow = Literal["stop", "drop"]


class ContextFullError(GenerationError):
    """The model's context has no room for a message and an answer."""


class MessageTooLongError(ContextFullError):
    """The message has no room even without any turn before it: dropping turns can't help."""


def check_context_overflow(policy: str) -> ContextOverflow:
    """Raises GenerationError for what isn't a policy."""
    if policy not in get_args(ContextOverflow):
        raise GenerationError(f"overflow is {policy!r}", " or ".join(get_args(ContextOverflow)))
    return policy


def fit_to_context(
    conversation: Conversation,
    prompt_of: Callable[[Conversation], list[int]],
    size: int,
    policy: ContextOverflow,
    max_tokens: int | None,
) -> tuple[Conversation, list[int]]:
    """`conversation`, shortened where the policy asks for it, and the prompt that `prompt_of` makes of it.

    "drop" keeps room free for an answer of `max_tokens`, but no more than a quarter of the context of `size` tokens.
    Raises ContextFull, MessageTooLong where no policy can help.
    """
    prompt = prompt_of(conversation)
    room = min(size // 4, size if max_tokens is None else max_tokens)
    if policy == "drop" and size - len(prompt) < room:
        return drop_oldest_turns(conversation, prompt_of, size)
    if len(prompt) >= size:
        _check_alone(conversation, prompt_of, size)
        raise ContextFullError(
            f"the conversation would have {len(prompt)} tokens, and the model's context has {size}",
            "fewer turns (undo, reset, or drop the oldest)",
        )
    return conversation, prompt


def drop_oldest_turns(
    conversation: Conversation, prompt_of: Callable[[Conversation], list[int]], size: int
) -> tuple[Conversation, list[int]]:
    """`conversation` without its oldest turns, as many as it takes for its prompt to have at most `size // 2` tokens,
    or without all of them where that isn't enough; and the prompt.

    What stays is read again, as its positions are others behind the system message: with a half kept, once for every
    half context of new text, so each token about twice; with three quarters kept it would be four times.
    Raises MessageTooLong where even the last message alone has no room.
    """
    _check_alone(conversation, prompt_of, size)
    turns = range(len(conversation.visible_turns) + 1)

    def fits(n: int) -> bool:  # fewer turns are fewer tokens
        return n == turns[-1] or len(prompt_of(conversation.without_oldest(n))) <= size // 2

    shorter = conversation.without_oldest(bisect_left(turns, True, key=fits))
    return shorter, prompt_of(shorter)


def _check_alone(conversation: Conversation, prompt_of: Callable[[Conversation], list[int]], size: int) -> None:
    alone = len(prompt_of(conversation.without_oldest(len(conversation.visible_turns))))
    if alone >= size:
        raise MessageTooLongError(
            f"the message alone takes {alone} tokens, and the model's context has {size}",
            f"at least {alone - size + 1} tokens less of message and system prompt, or a model with a larger context",
        )
