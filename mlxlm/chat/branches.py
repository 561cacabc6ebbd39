"""Turns of a conversation, and its branches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mlxlm.chat.chat_template import Message
from mlxlm.generation import FinishReason
from mlxlm.utils.errors import GenerationError

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
    """

    question: str
    answer: str
    ids: tuple[int, ...] = ()
    seed: int | None = None
    finish_reason: FinishReason | None = None
    time: str | None = None

    @property
    def messages(self) -> tuple[Message, Message]:
        """The turn as two messages."""
        return Message("user", self.question), Message("assistant", self.answer, self.ids)


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

    def with_turn(self, turn: Turn) -> Conversation:
        """Return a copy with one more turn."""
        return Conversation((*self.turns, turn), self.dropped)

    def without_oldest(self, n: int) -> Conversation:
        """Return a copy with the `n` oldest visible turns dropped."""
        return Conversation(self.turns, self.dropped + n)


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
        raise GenerationError(
            f"{name!r} is not a valid branch name", f"one word of at most {_MAX_NAME_LENGTH} characters"
        )
