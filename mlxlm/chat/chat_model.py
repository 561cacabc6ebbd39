"""The model's side of a chat: its template, its cache, and how much fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mlxlm.cache import KVOptions
from mlxlm.chat.chat_template import PLAIN, Message, chat_encoder
from mlxlm.chat.context_checkpoint import CheckpointedContext
from mlxlm.generation import GenerationOptions, LoadedModel, TextStream
from mlxlm.generation.context import UNLIMITED, common_prefix_length
from mlxlm.generation.sequence import build_sampler, max_new_tokens_for

if TYPE_CHECKING:
    from mlxlm.generation.speculative import SpeculativeDecoder


class ChatModel:
    """A model that reads a conversation, and keeps in `context` what it has read of it.

    defaults: options that nobody has set.
    limit: tokens that a conversation may have, answer included; more than ENDLESS where the cache rotates.
    eos_token_ids: tokens that end an answer.
    """

    def __init__(self, lm: LoadedModel, chat_template: str | None, kv: KVOptions):
        """Raises TokenizerError for a template that is broken or isn't there, GenerationError for cache settings that
        this model can't serve."""
        self.lm, self.requested_chat_template = lm, chat_template
        self.chat_encoder = chat_encoder(lm, chat_template)
        self.limit = 1 + max_new_tokens_for(lm, [0], kv)
        self.context = CheckpointedContext(lm.model, kv)
        self.eos_token_ids = lm.eos_token_ids | {
            id for id in self.chat_encoder.eos_token_ids if id < lm.config.vocab_size
        }
        self.defaults = GenerationOptions(**({} if self.chat_encoder.name == PLAIN else {"max_tokens": None}))

    @property
    def size(self) -> int:
        """Tokens that the model can see: its context, or what a rotating cache holds."""
        return self.context.kv.size if self.limit > UNLIMITED else self.limit

    def check(self, options: GenerationOptions) -> None:
        """Raise GenerationError for options that this model can't serve."""
        options.check_vocabulary(self.lm.config.vocab_size)
        build_sampler(self.lm, [0], options, 0, self.eos_token_ids)

    def prompt(self, earlier: Sequence[Message], question: str) -> list[int]:
        """The ids of a conversation and a question, up to where the answer begins."""
        return self.chat_encoder.encode([*earlier, Message("user", question)])

    def count_tokens(self, messages: Sequence[Message]) -> int:
        """Tokens of `size` that a conversation takes."""
        return min(self.size, len(self.chat_encoder.encode(messages, add_generation_prompt=False)))

    def answer(
        self,
        earlier: Sequence[Message],
        prompt: Sequence[int],
        options: GenerationOptions,
        speculation: SpeculativeDecoder | None,
        on_prefill: Callable[[int], None] | None,
    ) -> TextStream:
        """The answer to the `prompt` of a question after `earlier` messages, of which only that is read which the
        context doesn't hold."""
        if self.context.drops_tokens:
            self.context.checkpoint_at = common_prefix_length(
                prompt, self.prompt(earlier, "")
            )  # where the question begins
        return TextStream(
            self.lm, prompt, options, context=self.context, eos_token_ids=self.eos_token_ids, on_prefill=on_prefill,
            speculation=speculation,
        )  # fmt: skip
