"""Context overflow: when a conversation no longer fits the model's context, and which turns are dropped."""

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
    """The message doesn't fit even without earlier turns: dropping turns can't help."""


def check_context_overflow(policy: str) -> ContextOverflow:
    """Return `policy`. Raise GenerationError if it is not a policy."""
    if policy not in get_args(ContextOverflow):
        raise GenerationError(f"context_overflow is {policy!r}", " or ".join(get_args(ContextOverflow)))
    return "drop" if policy == "drop" else "stop"


def fit_to_context(
    conversation: Conversation,
    prompt_of: Callable[[Conversation], list[int]],
    size: int,
    policy: ContextOverflow,
    max_tokens: int | None,
) -> tuple[Conversation, list[int]]:
    """Make room for an answer, if the policy allows it.

    Args:
        conversation: The turns before the new message.
        prompt_of: Returns the token ids of a conversation with the new message.
        size: Tokens of the model's context.
        policy: "drop" reserves `max_tokens` for the answer, but at most a quarter of the context.
        max_tokens: Length limit of the answer.

    Returns:
        The conversation, possibly shortened, and its prompt.

    Raises:
        ContextFullError: The prompt doesn't fit and the policy is "stop".
        MessageTooLongError: The message doesn't fit by itself.
    """
    prompt = prompt_of(conversation)
    reserved = min(size // 4, size if max_tokens is None else max_tokens)
    if policy == "drop" and size - len(prompt) < reserved:
        return drop_oldest_turns(conversation, prompt_of, size)
    if len(prompt) >= size:
        _check_message_fits(conversation, prompt_of, size)
        raise ContextFullError(
            f"the conversation would have {len(prompt)} tokens, and the model's context has {size}",
            "fewer turns (undo, reset, or drop the oldest)",
        )
    return conversation, prompt


def drop_oldest_turns(
    conversation: Conversation, prompt_of: Callable[[Conversation], list[int]], size: int
) -> tuple[Conversation, list[int]]:
    """Drop the oldest turns until the prompt has at most `size // 2` tokens, or no turn is left.

    The remaining turns are read again, as their positions behind the system message change. Keeping half of the context
    reads each token about twice; keeping three quarters would read it four times.

    Returns:
        The shortened conversation and its prompt.

    Raises:
        MessageTooLongError: The message doesn't fit by itself.
    """
    _check_message_fits(conversation, prompt_of, size)
    counts = range(len(conversation.visible_turns) + 1)

    def fits(n: int) -> bool:  # fewer turns are fewer tokens
        return n == counts[-1] or len(prompt_of(conversation.without_oldest(n))) <= size // 2

    shorter = conversation.without_oldest(bisect_left(counts, True, key=fits))
    return shorter, prompt_of(shorter)


def _check_message_fits(conversation: Conversation, prompt_of: Callable[[Conversation], list[int]], size: int) -> None:
    alone = len(prompt_of(conversation.without_oldest(len(conversation.visible_turns))))
    if alone >= size:
        raise MessageTooLongError(
            f"the message alone takes {alone} tokens, and the model's context has {size}",
            f"at least {alone - size + 1} tokens less of message and system prompt, or a model with a larger context",
        )
