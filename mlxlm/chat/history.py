"""The history of a chat: its turns and branches, and which turns are dropped when the context overflows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from mlxlm.chat.messages import Message
from mlxlm.generation import FinishReason
from mlxlm.tokenizer.tokenizer import check_unicode
from mlxlm.utils.errors import GenerationError

ContextOverflow = Literal["stop", "drop"]
MAIN_BRANCH = "main"
MAX_BRANCHES = 100  # each can become a conversation of its own when a session file is read
_MAX_NAME_LENGTH = 40  # characters


@dataclass(frozen=True)
class Turn:
    """A question and its answer.

    Attributes:
        question: What the user said.
        answer: What the model said, including its reasoning in its tags.
        ids: Tokens of the answer; empty if they don't decode to exactly its text.
        seed: Seed that the answer was sampled with.
        finish_reason: As in `GenerationResult`.
        time: When the answer was finished (ISO 8601, UTC).
        steps: What comes before the answer if tools were called: the messages with calls, and their results.
    """

    question: str
    answer: str
    ids: tuple[int, ...] = ()
    seed: int | None = None
    finish_reason: FinishReason | None = None
    time: str | None = None
    steps: tuple[Message, ...] = ()

    @property
    def messages(self) -> tuple[Message, ...]:
        """The turn as messages: two, if no tools were called."""
        return Message("user", self.question), *self.steps, Message("assistant", self.answer, self.ids)


@dataclass(frozen=True)
class Conversation:
    """The turns of one branch. The model no longer sees the first `dropped` of them, which made room for others."""

    turns: tuple[Turn, ...] = ()
    dropped: int = 0

    @property
    def visible_turns(self) -> tuple[Turn, ...]:
        """The turns that the model sees."""
        return self.turns[self.dropped :]

    def pop_turn(self) -> tuple[Conversation, Turn]:
        """Return a copy without the last turn, and that turn. Raise GenerationError if there is none."""
        if not self.turns:
            raise GenerationError("there is no message yet", "a message first")
        *turns, last = self.turns
        return Conversation(tuple(turns), min(self.dropped, len(turns))), last

    def without_oldest(self, n: int) -> Conversation:
        """Return a copy with the `n` oldest visible turns dropped."""
        return Conversation(self.turns, self.dropped + n)


@dataclass
class Exchange:
    """A turn whose answer is being generated.

    Attributes:
        conversation: The turns before it.
        question: What it answers.
        steps: The messages with calls of tools, and their results, so far.
        answer: The text that it continues, if any.
        prompt: The tokens of all this.
    """

    conversation: Conversation
    question: str
    steps: list[Message] = field(default_factory=list)
    answer: Message | None = None
    prompt: Sequence[int] = ()


def turns_of(messages: Sequence[Message]) -> tuple[Turn, ...]:
    """Return the turns of messages of the user and the assistant.

    Raises:
        GenerationError: They aren't in turn, or the last one isn't an answer.
        TokenizerError: A text has a lone surrogate.
    """
    turns: list[Turn] = []
    question: Message | None = None
    steps: list[Message] = []
    for message in messages:
        expected = "user" if question is None else "assistant"
        if message.role != expected and not (steps and message.role == "tool"):
            kind = f"the role {message.role!r} where a text of the {expected} was expected"
            hint = "messages of the user and the assistant in turn, after the system prompt"
            raise GenerationError(f"a message has {kind}: {message.content[:40]!r}", hint)
        check_unicode(message.content)
        if question is None:
            question = message
        elif message.tool_calls or message.role == "tool":
            steps.append(message)
        else:
            turns.append(Turn(question.content, message.content, message.ids, steps=tuple(steps)))
            question, steps = None, []
    if question is not None:
        raise GenerationError("the last message has no answer", "messages that end with an answer, then `ask`")
    return tuple(turns)


class Branches:
    """Conversations by name, one of them current. They share the turns that they have in common."""

    def __init__(self, conversations: Mapping[str, Conversation] | None = None, name: str = MAIN_BRANCH):
        self.all = dict(conversations or {MAIN_BRANCH: Conversation()})
        self.name = name

    @property
    def current(self) -> Conversation:
        """The conversation of the current branch."""
        return self.all[self.name]

    @current.setter
    def current(self, conversation: Conversation) -> None:
        self.all[self.name] = conversation

    def drop_ids_unless(self, is_valid: Callable[[Turn], bool]) -> None:
        """Drop the token ids of all turns that are not valid: they are text only."""
        for name, conversation in self.all.items():
            turns = tuple(turn if is_valid(turn) else replace(turn, ids=()) for turn in conversation.turns)
            self.all[name] = Conversation(turns, conversation.dropped)

    def fork(self, name: str) -> None:
        """Copy the current branch to a new one, and switch to it.

        Raises:
            GenerationError: The name is taken or invalid, or there are `MAX_BRANCHES` already.
        """
        check_branch_name(name)
        if name in self.all:
            raise GenerationError(f"branch {name} already exists", "another name, or switch to it")
        if len(self.all) == MAX_BRANCHES:
            raise GenerationError(f"this chat already has {MAX_BRANCHES} branches", "a new chat")
        self.all[name] = self.current
        self.name = name

    def switch(self, name: str) -> None:
        """Make another branch current. Raise GenerationError if it doesn't exist."""
        if name not in self.all:
            raise GenerationError(f"there is no branch {name}", "one of " + ", ".join(self.all))
        self.name = name


def check_branch_name(name: str) -> None:
    """Raise GenerationError for an invalid branch name."""
    if not (0 < len(name) <= _MAX_NAME_LENGTH and name.isprintable() and not any(c.isspace() for c in name)):
        hint = f"one word of at most {_MAX_NAME_LENGTH} characters"
        raise GenerationError(f"{name!r} is not a valid branch name", hint)


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
            f"the message takes {alone} tokens with system prompt and tools, and the model's context has {size}",
            "a shorter message or a model with a larger context",
        )
