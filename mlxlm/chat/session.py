"""A conversation with a model over one key-value cache. No terminal in it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, replace

from mlxlm.chat.template import Message, transcript
from mlxlm.errors import GenerationError
from mlxlm.generation import Chunk, Context, GenerationOptions, LoadedModel, Result, TextStream
from mlxlm.generation.sampling import draw_seed


@dataclass(frozen=True)
class Stats:
    """A session so far. `last` is the last answer; `context_used` the tokens that the cache holds."""

    turns: int
    generated_tokens: int
    context_used: int
    context_size: int
    seed: int
    last: Result | None


class ChatSession:
    """Messages, and the cache of what the model has read of them.

        session = ChatSession(loaded, system="You are brief.")
        for chunk in session.ask("Hello!"):
            print(chunk.text, end="")

    Each turn encodes the whole conversation and reads only what the cache doesn't begin with: with a
    template that leaves earlier messages as they are, the new message. `messages` may be edited between
    turns; the cache follows. Turn n (from 0) draws its tokens with seed + n.
    """

    def __init__(self, loaded: LoadedModel, system: str | None = None, options: GenerationOptions | None = None):
        """Raises TokenizerError if the model's chat template is broken."""
        self._loaded = loaded
        self._system = system
        self._options = options or GenerationOptions()
        self._transcript = transcript(loaded.tokenizer)
        self._context = Context(loaded.model)
        self._turns = self._generated = 0
        self._last: Result | None = None
        self.seed = draw_seed() if self._options.seed is None else self._options.seed
        self.reset()

    def reset(self) -> None:
        """Forget the conversation, not the system prompt."""
        self.messages = [Message("system", self._system)] if self._system else []
        self._context.clear()

    @property
    def stats(self) -> Stats:
        size = self._loaded.config.max_position_embeddings
        return Stats(self._turns, self._generated, len(self._context.ids), size, self.seed, self._last)

    def ask(self, text: str, *, on_prefill: Callable[[int], None] | None = None) -> Generator[Chunk, None, None]:
        """Answer a message. Closing the generator stops the answer: what was said stays in the conversation.

        A message whose answer is stopped before its first token is forgotten. `on_prefill` is that of
        `engine.tokens`. Raises GenerationError, before anything is computed, for an empty message and for
        a conversation that has outgrown the model's context; TokenizerError if the template refuses it.
        """
        if not text:
            raise GenerationError("the message is empty", "some text")
        question = Message("user", text)
        prompt = self._transcript.encode([*self.messages, question])
        size = self._loaded.config.max_position_embeddings
        if len(prompt) >= size:
            raise GenerationError(
                f"the conversation would have {len(prompt)} tokens, and the model's context has {size}",
                "/reset, or a shorter message",
            )
        answer = TextStream(
            self._loaded,
            prompt,
            replace(self._options, seed=(self.seed + self._turns) % 2**64),
            context=self._context,
            end_ids=self._loaded.end_ids | self._transcript.end_ids,
            on_prefill=on_prefill,
        )
        return self._answer(question, answer)

    def _answer(self, question: Message, answer: TextStream) -> Generator[Chunk, None, None]:
        try:
            yield from answer
        finally:
            answer.close()
            result = answer.result
            if result.tokens:
                said = Message("assistant", result.text, self._ids_of(result))
                self.messages += [question, said]
                self._turns += 1
                self._generated += len(result.tokens)
                self._last = result

    def _ids_of(self, result: Result) -> tuple[int, ...]:
        """The ids of an answer's text; none where they say more than the text (a stop string, half a character)."""
        ids = result.tokens[:-1] if result.finish_reason == "eos" else result.tokens
        return tuple(ids) if self._loaded.tokenizer.decode(ids) == result.text else ()
