"""The history of a chat: turns, conversations, and branches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from mlxlm.chat.messages import Message
from mlxlm.generation import FinishReason
from mlxlm.tokenizer.tokenizer import check_unicode
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


def turns_of(messages: Sequence[Message]) -> tuple[Turn, ...]:
    """Return the turns of messages of the user and the assistant.

    Raises:
        GenerationError: They aren't in turn, or the last one isn't an answer.
        TokenizerError: A text has a lone surrogate.
    """
    for number, message in enumerate(messages, 1):
        role = "user" if number % 2 else "assistant"
        if message.role != role or message.tool_calls:
            kind = "calls of functions" if message.role == role else f"the role {message.role!r}"
            problem = f"a message has {kind} where a text of the {role} was expected: {message.content[:40]!r}"
            raise GenerationError(problem, "messages of the user and the assistant in turn, after the system prompt")
        check_unicode(message.content)
    if len(messages) % 2:
        raise GenerationError("the last message has no answer", "messages that end with an answer, then `ask`")
    return tuple(
        Turn(question.content, answer.content, answer.ids)
        for question, answer in zip(messages[::2], messages[1::2], strict=True)
    )


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


class ChatHistory:
    """The messages of a chat: its system prompt and its branches.

    Every method that changes them first ends an answer that is still being generated; the text so far stays.
    """

    def __init__(self, system_prompt: str | None, messages: Sequence[Message] = ()):
        if messages and messages[0].role == "system":
            if system_prompt is not None:
                hint = "system_prompt, or a first message with the role system"
                raise GenerationError("there are two system prompts", hint)
            system_prompt, messages = messages[0].content, messages[1:]
        self.system_prompt = system_prompt
        self._branches = Branches({MAIN_BRANCH: Conversation(turns_of(messages))})

    @property
    def system_prompt(self) -> str | None:
        """The system prompt of the next turns. Setting it raises TokenizerError for lone surrogates."""
        return self._system_prompt

    @system_prompt.setter
    def system_prompt(self, text: str | None) -> None:
        check_unicode(text or "")
        self._system_prompt = text or None

    @property
    def messages(self) -> list[Message]:
        """The messages of the current branch, the system prompt first, including dropped ones."""
        return self._messages(self._branches.current.turns)

    @property
    def dropped(self) -> int:
        """How many of the oldest messages of this branch the model no longer sees."""
        return 2 * self._branches.current.dropped

    @property
    def branch_name(self) -> str:
        """The current branch."""
        return self._branches.name

    @property
    def branches(self) -> dict[str, int]:
        """The number of turns in each branch."""
        return {name: len(conversation.turns) for name, conversation in self._branches.all.items()}

    def undo(self) -> Turn:
        """Remove the last message and its answer, and return them.

        If the model then sees no turn at all, dropped turns become visible again.

        Raises:
            GenerationError: There is no message.
        """
        self._end_answer()
        shorter, last = self._branches.current.pop_turn()
        self._branches.current = shorter if shorter.visible_turns else Conversation(shorter.turns)
        return last

    def branch(self, name: str) -> None:
        """Continue in a new branch. Raise GenerationError if the name is taken or is not one word."""
        self._end_answer()
        self._branches.fork(name)

    def switch(self, name: str) -> None:
        """Continue in another branch. Raise GenerationError if it doesn't exist."""
        self._end_answer()
        self._branches.switch(name)

    def reset(self) -> None:
        """Remove the conversation with all its branches, but keep the system prompt."""
        self._end_answer()
        self._branches = Branches()

    def _end_answer(self) -> None:
        """End an answer that is being generated."""

    def _messages(self, turns: Sequence[Turn]) -> list[Message]:
        system = [Message("system", self._system_prompt)] if self._system_prompt else []
        return system + [message for turn in turns for message in turn.messages]

    def _set_dropped(self, dropped: int) -> None:
        self._branches.current = replace(self._branches.current, dropped=dropped)
