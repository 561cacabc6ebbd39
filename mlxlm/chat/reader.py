"""The model's side of a chat: its template, its cache, and how much fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mlxlm.cache import KVOptions
from mlxlm.chat.marks import MarkedContext
from mlxlm.chat.template import Message, transcript
from mlxlm.generation import GenerationOptions, LoadedModel, TextStream
from mlxlm.generation.context import ENDLESS, shared
from mlxlm.generation.growing import check_prompt

if TYPE_CHECKING:
    from mlxlm.generation.speculative import Speculation


class Reader:
    """A model that reads a conversation, and keeps in `context` what it has read of it.

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
        self.end_ids = loaded.end_ids | self.transcript.end_ids

    @property
    def rotates(self) -> bool:
        return self.limit > ENDLESS

    @property
    def size(self) -> int:
        """Tokens that the model can see: its context, or what a rotating cache holds."""
        return self.context.kv.size if self.rotates else self.limit

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """The ids of a conversation, up to where the answer begins."""
        return self.transcript.encode(messages)

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
        """The answer to a prompt, of which only that is read which the context doesn't hold. `earlier`: the messages
        before the question, as far as the context should be able to go back to their end."""
        self.context.mark_at = 0
        if earlier:
            self.context.mark_at = shared(prompt, self.transcript.encode(earlier, add_generation_prompt=False))
        return TextStream(
            self.loaded, prompt, options, context=self.context, end_ids=self.end_ids, on_prefill=on_prefill,
            speculation=speculation,
        )  # fmt: skip
