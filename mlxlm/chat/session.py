"""A conversation with a model over one key-value cache. No terminal in it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from mlxlm.chat.branches import Branches, Conversation, Turn
from mlxlm.chat.reasoning import Splitter
from mlxlm.chat.template import Message, transcript
from mlxlm.errors import GenerationError
from mlxlm.generation import Context, FinishReason, GenerationOptions, LoadedModel, Result, TextStream
from mlxlm.generation.sampling import draw_seed

Overflow = Literal["stop", "drop"]


class ContextFull(GenerationError):
    """The model's context has no room for the conversation and its next answer."""


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
    """A chat so far: answers drawn, undone ones included, and their tokens; `last` is the last of them.

    `context_used` of `context_size` tokens are taken by the conversation; `cache_bytes` are the bytes of the caches.
    """

    turns: int
    generated_tokens: int
    context_used: int
    context_size: int
    cache_bytes: int
    seed: int
    last: Result | None


class Chat:
    """A conversation, its branches, and the cache of what the model has read of it.

        chat = Chat(loaded, system="You are brief.")
        for piece in chat.ask("Hello!"):
            print(piece.text, end="")

    Each turn encodes the whole conversation and reads only what the cache doesn't begin with: with a template that
    leaves earlier messages as they are, the new message. Undo, retry, edit, branch and switch change only what is
    said; the next turn shortens the cache to what is common. Answer n (from 0, retries and undone ones included)
    is drawn with seed + n.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        system: str | None = None,
        template: str | None = None,
        overflow: Overflow = "stop",
        kv=None,
        speculation=None,
        **options: Any,
    ):
        self._options = GenerationOptions.of(**options)
        self.seed = draw_seed() if self._options.seed is None else self._options.seed
        self.system = system
        self.overflow = overflow
        self.template = template
        self.kv, self.speculation = kv, speculation
        self._loaded = loaded
        self._transcript = transcript(loaded.tokenizer)
        self._context = Context(loaded.model)
        self._branches = Branches()
        self._drawn = self._generated = 0
        self._last: Result | None = None
        self._answering: Generator[Piece, None, None] | None = None

    @property
    def messages(self) -> list[Message]:
        """The conversation of the current branch, the system message first."""
        return self._messages(self._branches.current.turns)

    def _messages(self, turns: tuple[Turn, ...]) -> list[Message]:
        system = [Message("system", self.system)] if self.system else []
        return system + [message for turn in turns for message in turn.messages]

    @property
    def options(self) -> GenerationOptions:
        return self._options

    @options.setter
    def options(self, options: GenerationOptions) -> None:
        self._options = options

    @property
    def loaded(self) -> LoadedModel:
        return self._loaded

    @property
    def context_size(self) -> int:
        return self._loaded.config.max_position_embeddings

    @property
    def context_used(self) -> int:
        return len(self._context.ids)

    @property
    def dropped(self) -> int:
        """Messages of this branch that the model no longer sees."""
        return 2 * self._branches.current.dropped

    @property
    def branch_name(self) -> str:
        return self._branches.name

    @property
    def branches(self) -> dict[str, int]:
        """Number of turns in every branch."""
        return {name: len(conversation.turns) for name, conversation in self._branches.all.items()}

    @property
    def stats(self) -> Stats:
        held = sum(cache.nbytes for cache in self._context.caches)
        return Stats(
            self._drawn, self._generated, self.context_used, self.context_size, held, self.seed, self._last
        )

    def ask(self, text: str, *, on_prefill: Callable[[int], None] | None = None) -> Generator[Piece, None, None]:
        """Answer a message."""
        return self._ask(self._branches.current, text, on_prefill)

    def retry(self, *, on_prefill: Callable[[int], None] | None = None) -> Generator[Piece, None, None]:
        """Answer the last message again, with the next seed."""
        conversation = self._branches.current
        return self._ask(conversation.before_last(), conversation.turns[-1].question, on_prefill)

    def edit(self, text: str, *, on_prefill: Callable[[int], None] | None = None) -> Generator[Piece, None, None]:
        """Say `text` instead of the last message, and answer it."""
        return self._ask(self._branches.current.before_last(), text, on_prefill)

    def undo(self) -> Turn:
        """Forget the last message and its answer, and return them."""
        turn = self._branches.current.turns[-1:]
        self._branches.current = self._branches.current.before_last()
        return turn[0]

    def branch(self, name: str | None = None) -> str:
        """Go on in a new branch, the current one staying as it is; return its name."""
        return self._branches.fork(name)

    def switch(self, name: str) -> None:
        self._branches.switch(name)

    def reset(self) -> None:
        """Forget the conversation with all its branches, not the system prompt."""
        self._branches = Branches()
        self._context.clear()

    def _ask(
        self, conversation: Conversation, text: str, on_prefill: Callable[[int], None] | None
    ) -> Generator[Piece, None, None]:
        if not text:
            raise GenerationError("the message is empty", "some text")
        prompt = self._transcript.encode([*self._messages(conversation.seen), Message("user", text)])
        if len(prompt) >= self.context_size:
            raise ContextFull(
                f"the conversation would have {len(prompt)} tokens, and the model's context has {self.context_size}",
                "/reset, or a shorter message",
            )
        answer = TextStream(
            self._loaded,
            prompt,
            replace(self._options, seed=(self.seed + self._drawn) % 2**64),
            context=self._context,
            end_ids=self._loaded.end_ids | self._transcript.end_ids,
            on_prefill=on_prefill,
        )
        return self._answer(conversation, text, answer)

    def _answer(self, conversation: Conversation, question: str, answer: TextStream) -> Generator[Piece, None, None]:
        splitter = Splitter()
        try:
            for chunk in answer:
                pieces = splitter.push(chunk.text)
                if chunk.finish_reason:
                    pieces += splitter.finish()
                *before, (text, thinking) = pieces or [("", False)]
                for piece in before:
                    yield Piece(*piece)
                yield Piece(text, thinking, chunk.finish_reason)
        finally:
            answer.close()
            result = answer.result
            if result.tokens:
                now = datetime.now(UTC).isoformat(timespec="seconds")
                turn = Turn(question, result.text, self._ids_of(result), result.seed, result.finish_reason, now)
                self._branches.current = conversation.with_turn(turn)
                self._drawn += 1
                self._generated += len(result.tokens)
                self._last = result

    def _ids_of(self, result: Result) -> tuple[int, ...]:
        """The ids of an answer's text; none where they say more than the text (a stop string, half a character)."""
        ids = result.tokens[:-1] if result.finish_reason == "eos" else result.tokens
        return tuple(ids) if self._loaded.tokenizer.decode(ids) == result.text else ()


class ChatSession(Chat):
    """The name that the terminal still uses."""

    def __init__(self, loaded: LoadedModel, system: str | None = None, options: GenerationOptions | None = None):
        super().__init__(loaded, system=system)
        self._options = options or self._options
        self.seed = self.seed if self._options.seed is None else self._options.seed
