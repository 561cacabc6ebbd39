"""What a chat needs of its model: the template, the context, and how much fits into it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from mlxlm.cache import KVOptions
from mlxlm.cache.prefix_cache import common_prefix_length
from mlxlm.chat.chat_prompts import answer_eos_token_ids
from mlxlm.chat.chat_template import chat_encoder
from mlxlm.chat.messages import Message
from mlxlm.chat.plain_text import PLAIN
from mlxlm.generation import Context, Engine, GenerationOptions, LoadedModel, Request, TextStream
from mlxlm.generation.context import UNLIMITED
from mlxlm.generation.request import max_new_tokens_for

if TYPE_CHECKING:
    from mlxlm.generation.speculative import SpeculativeDecoder


class ChatModel:
    """A model with everything that changes when a chat switches to another one.

    Attributes:
        engine: Generates the answers, and keeps what was read.
        defaults: The generation options of a new chat.
        limit: Tokens of a conversation, its answer included; more than `UNLIMITED` with a rotating cache.
        eos_token_ids: Tokens that end an answer.
    """

    def __init__(
        self, lm: LoadedModel, chat_template: str | None, kv: KVOptions, speculation: SpeculativeDecoder | None
    ):
        """Raise TokenizerError for a bad chat template, GenerationError for cache settings this model can't use."""
        self.lm, self.requested_chat_template = lm, chat_template
        self.chat_encoder = chat_encoder(lm.tokenizer, lm.eos_token_ids, chat_template)
        self.limit = 1 + max_new_tokens_for(lm, [0], kv)
        self.engine = Engine(lm, kv=kv, speculation=speculation)
        self._drops_tokens = Context(lm.model, kv).drops_tokens
        self.eos_token_ids = answer_eos_token_ids(lm, self.chat_encoder)
        self.defaults = lm.generation_options()
        if self.chat_encoder.name != PLAIN:
            self.defaults = replace(self.defaults, max_tokens=None)

    @property
    def context_size(self) -> int:
        """Tokens that the model can see: its context, or the size of a rotating cache."""
        return min(self.limit, self.engine.kv.size or UNLIMITED)

    def check(self, options: GenerationOptions) -> None:
        """Raise GenerationError for options that this model can't use."""
        request = Request([0], options, self.eos_token_ids)
        request.check(self.lm, self.engine.kv)
        request.compile_grammar(self.lm)

    @cached_property
    def answer_start(self) -> Message:
        """What the template puts at the start of an answer, such as an opening "<think>"."""
        text = self.chat_encoder.generation_prefix
        ids = self.lm.tokenizer.encode(text, add_special_tokens=False, parse_special=True, continues=True)
        return Message("assistant", text, tuple(ids))

    def prompt(self, earlier: Sequence[Message], question: str, answer: Message | None = None) -> list[int]:
        """Return the token ids of a conversation and a question, up to where the answer starts.

        With `answer` they end with its text, which the model continues. Raises TokenizerError if the template doesn't
        end with it.
        """
        messages = [*earlier, Message("user", question)]
        if answer is None:
            return self.chat_encoder.encode(messages)
        return self.chat_encoder.encode([*messages, answer], continue_final_message=True)

    def answer(
        self,
        earlier: Sequence[Message],
        prompt: Sequence[int],
        options: GenerationOptions,
        on_prefill: Callable[[int], None] | None,
    ) -> TextStream:
        """Start the answer to `prompt`, a question after `earlier` messages."""
        question = common_prefix_length(prompt, self.prompt(earlier, "")) if self._drops_tokens else None
        if options.seed is not None:
            options = options.with_seed(options.seed)  # deterministic answers read the whole conversation again
        return self.engine.submit(Request(prompt, options, self.eos_token_ids, question), on_prefill=on_prefill)
