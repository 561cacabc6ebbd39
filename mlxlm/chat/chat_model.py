"""The model's side of a chat: its template, its cache, and how much fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mlxlm.cache import KVOptions
from mlxlm.chat.chat_template import PLAIN, Message, transcript
from mlxlm.chat.context_checkpoint import MarkedContext
from mlxlm.generation import GenerationOptions, LoadedModel, TextStream
from mlxlm.generation.context import ENDLESS, shared
from mlxlm.generation.sequence import check_prompt, make_sampler

if TYPE_CHECKING:
    from mlxlm.generation.speculative import Speculation


class Reader:
    """A model that reads a conversation, and keeps in `context` what it has read of it.

    defaults: options that nobody has set.
    limit: tokens that a conversation may have, answer included; more than ENDLESS where the cache rotates.
    end_ids: tokens that end an answer.
    """

    def __init__(self, loaded: LoadedModel, template: str | None, kv: KVOptions):
        """Raises TokenizerError for a template that is broken or isn't there, GenerationError for cache settings that
        this model can't serve."""
        self.loaded, self.asked_template = loaded, template
        self.transcript = transcript(loaded, template)
        self.limit = 1 + check_prompt(loaded, [0], kv)
        self.context = MarkedContext(loaded.model, kv)
        self.end_ids = loaded.end_ids | {id for id in self.transcript.end_ids if id < loaded.config.vocab_size}
        self.defaults = GenerationOptions(**({} if self.transcript.name == PLAIN else {"max_tokens": None}))

    @property
    def size(self) -> int:
        """Tokens that the model can see: its context, or what a rotating cache holds."""
        return self.context.kv.size if self.limit > ENDLESS else self.limit

    def check(self, options: GenerationOptions) -> None:
        """Raise GenerationError for options that this model can't serve."""
        options.check_vocabulary(self.loaded.config.vocab_size)
        make_sampler(self.loaded, [0], options, 0, self.end_ids)

    def prompt(self, earlier: Sequence[Message], question: str) -> list[int]:
        """The ids of a conversation and a question, up to where the answer begins."""
        return self.transcript.encode([*earlier, Message("user", question)])

    def used(self, messages: Sequence[Message]) -> int:
        """Tokens of `size` that a conversation takes."""
        return min(self.size, len(self.transcript.encode(messages, add_generation_prompt=False)))

    def answer(
        self,
        earlier: Sequence[Message],
        prompt: Sequence[int],
        options: GenerationOptions,
        speculation: Speculation | None,
        on_prefill: Callable[[int], None] | None,
    ) -> TextStream:
        """The answer to the `prompt` of a question after `earlier` messages, of which only that is read which the
        context doesn't hold."""
        if self.context.drops:
            self.context.mark_at = shared(prompt, self.prompt(earlier, ""))  # where the question begins
        return TextStream(
            self.loaded, prompt, options, context=self.context, end_ids=self.end_ids, on_prefill=on_prefill,
            speculation=speculation,
        )  # fmt: skip
