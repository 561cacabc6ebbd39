"""What a chat needs of its model: the template, the context, and how much fits into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mlxlm.cache import KVOptions
from mlxlm.chat.chat_template import chat_encoder
from mlxlm.chat.context_checkpoint import CheckpointedContext
from mlxlm.chat.messages import Message
from mlxlm.chat.plain_text import PLAIN
from mlxlm.generation import GenerationOptions, LoadedModel, Request, TextStream
from mlxlm.generation.context import UNLIMITED, common_prefix_length
from mlxlm.generation.request import max_new_tokens_for
from mlxlm.generation.sequence import TokenSequence

if TYPE_CHECKING:
    from mlxlm.generation.speculative import SpeculativeDecoder


class ChatModel:
    """A model with everything that changes when a chat switches to another one.

    Attributes:
        context: The key-value caches and the tokens that they hold.
        defaults: The generation options of a new chat.
        limit: Tokens of a conversation, its answer included; more than `UNLIMITED` with a rotating cache.
        eos_token_ids: Tokens that end an answer.
    """

    def __init__(self, lm: LoadedModel, chat_template: str | None, kv: KVOptions):
        """Raise TokenizerError for a bad chat template, GenerationError for cache settings this model can't use."""
        self.lm, self.requested_chat_template = lm, chat_template
        self.chat_encoder = chat_encoder(lm.tokenizer, lm.eos_token_ids, chat_template)
        self.limit = 1 + max_new_tokens_for(lm, [0], kv)
        self.context = CheckpointedContext(lm.model, kv)
        template_eos = {id for id in self.chat_encoder.eos_token_ids if id < lm.config.vocab_size}
        self.eos_token_ids = lm.eos_token_ids | template_eos
        self.defaults = GenerationOptions()
        if self.chat_encoder.name != PLAIN:
            self.defaults = replace(self.defaults, max_tokens=None)

    @property
    def context_size(self) -> int:
        """Tokens that the model can see: its context, or the size of a rotating cache."""
        return min(self.limit, self.context.kv.size or UNLIMITED)

    def check(self, options: GenerationOptions) -> None:
        """Raise GenerationError for options that this model can't use."""
        TokenSequence(self.lm, Request([0], options, self.eos_token_ids), self.context.kv)

    def prompt(self, earlier: Sequence[Message], question: str) -> list[int]:
        """Return the token ids of a conversation and a question, up to where the answer starts."""
        return self.chat_encoder.encode([*earlier, Message("user", question)])

    def answer(
        self,
        earlier: Sequence[Message],
        prompt: Sequence[int],
        options: GenerationOptions,
        speculation: SpeculativeDecoder | None,
        on_prefill: Callable[[int], None] | None,
    ) -> TextStream:
        """Start the answer to `prompt`, a question after `earlier` messages; read only what the context lacks."""
        if self.context.drops_tokens:
            self.context.checkpoint_at = common_prefix_length(prompt, self.prompt(earlier, ""))  # start of the question
        request = Request(prompt, options, self.eos_token_ids)
        return TextStream(self.lm, request, context=self.context, on_prefill=on_prefill, speculation=speculation)
