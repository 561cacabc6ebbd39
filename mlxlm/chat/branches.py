"""What was said: turns, and the branches that a conversation has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from mlxlm.chat.chat_template import Message
from mlxlm.generation import FinishReason
from mlxlm.utils.errors import GenerationError

MAIN_BRANCH = "main"
MAX_BRANCHES = 100  # each can be a conversation of its own when a session file is read
_LONGEST_NAME = 40  # characters


@dataclass(frozen=True)
class Turn:
    """A question and its answer, which has the model's reasoning in front, in its tags.

    `ids` are the tokens of the answer, none where they say more or less than its text. `seed` drew it;
    `finish_reason` is that of `Result`; `time` is when it was done (ISO 8601, UTC).
    """

    question: str
    answer: str
    ids: tuple[int, ...] = ()
    seed: int | None = None
    finish_reason: FinishReason | None = None
    time: str | None = None

    @property
    def messages(self) -> tuple[Message, Message]:
        return Message("user", self.question), Message("assistant", self.answer, self.ids)


@dataclass(frozen=True)
class Conversation:
    """The turns of one branch. The first `dropped` of them made room for others: the model no longer sees them."""

    turns: tuple[Turn, ...] = ()
    dropped: int = 0

    @property
    def visible_turns(self) -> tuple[Turn, ...]:
        return self.turns[self.dropped :]

    def without_last_turn(self) -> Conversation:
        """Without the last turn. Raises GenerationError where there is none."""
        if not self.turns:
            raise GenerationError("there is no message yet", "a message first")
        turns = self.turns[:-1]
        return Conversation(turns, min(self.dropped, len(turns)))

    def with_turn(self, turn: Turn) -> Conversation:
        return Conversation((*self.turns, turn), self.dropped)

    def without_oldest(self, n: int) -> Conversation:
        """The `n` oldest turns that are still seen are dropped."""
        return Conversation(self.turns, self.dropped + n)


class Branches:
    """Conversations by name, one of them current. They share the turns that they have in common."""

    def __init__(self, conversations: Mapping[str, Conversation] | None = None, name: str = MAIN_BRANCH):
        self._all = dict(conversations or {MAIN_BRANCH: Conversation()})
        self.name = name

    @property
    def all(self) -> dict[str, Conversation]:
        return dict(self._all)

    @property
    def current(self) -> Conversation:
        return self._all[self.name]

    @current.setter
    def current(self, conversation: Conversation) -> None:
        self._all[self.name] = conversation

    def drop_ids_unless(self, good: Callable[[Turn], bool]) -> None:
        """Forget the ids of the turns that this doesn't hold for: they are text only."""
        for name, conversation in self._all.items():
            turns = tuple(turn if good(turn) else replace(turn, ids=()) for turn in conversation.turns)
            self._all[name] = Conversation(turns, conversation.dropped)

    def fork(self, name: str | None = None) -> str:
        """A new branch that begins as the current one, and is current from now on; return its name.

        Raises GenerationError for a name that is taken or isn't one, and for more than MOST_BRANCHES.
        """
        if name is None:
            numbers = range(2, MAX_BRANCHES + 2)
            name = next(f"branch-{n}" for n in numbers if f"branch-{n}" not in self._all)
        check_branch_name(name)
        if name in self._all:
            raise GenerationError(f"there is a branch {name} already", "another name, or switch to it")
        if len(self._all) == MAX_BRANCHES:
            raise GenerationError(f"this chat has {MAX_BRANCHES} branches, and no more fit", "a new chat")
        self._all[name] = self.current
        self.name = name
        return name

    def switch(self, name: str) -> None:
        """Raises GenerationError for a branch that isn't there."""
        if name not in self._all:
            raise GenerationError(f"there is no branch {name}", "one of " + ", ".join(self._all))
        self.name = name


def check_branch_name(name: str) -> None:
    """Raise GenerationError for what can't be the name of a branch."""
    if not (0 < len(name) <= _LONGEST_NAME and name.isprintable() and not any(c.isspace() for c in name)):
        raise GenerationError(
            f"{name!r} can't be the name of a branch", f"one word of at most {_LONGEST_NAME} characters"
        )
