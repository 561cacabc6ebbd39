"""Encodes the conversation of a request, and splits the answer into reasoning, text and tool calls."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from mlxlm.chat.messages import Message
from mlxlm.chat.reasoning import CLOSE, ReasoningParser
from mlxlm.generation import GenerationOptions
from mlxlm.generation.constraint import Grammar
from mlxlm.server.models import ServedModel


@dataclass(frozen=True)
class Conversation:
    """What a model answers.

    Attributes:
        messages: The messages; if the last one is the assistant's, the answer continues it.
        template_kwargs: More variables of the chat template.
    """

    messages: Sequence[Message]
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    async def encode(self, model: ServedModel) -> list[int]:
        """The ids of the prompt.

        Raises:
            TokenizerError: The chat template refuses the conversation.
        """
        return await asyncio.to_thread(
            model.encoder.encode,
            self.messages,
            continue_final_message=self.messages[-1].role == "assistant",
            template_kwargs=self.template_kwargs,
        )


def close_reasoning(model: ServedModel, prompt: Sequence[int]) -> list[int]:
    """End a block of reasoning that the template has opened, for a constrained answer, which can't have one."""
    if not model.encoder.generation_prefix_of(prompt):
        return list(prompt)
    encode = model.lm.tokenizer.encode
    return [*prompt, *encode(f"\n{CLOSE}\n\n", add_special_tokens=False, parse_special=True, continues=True)]


async def check_constraint(model: ServedModel, options: GenerationOptions) -> None:
    """Raise GenerationError for a constraint that isn't supported. It is compiled once, also for the engine."""
    if options.constraint is not None:
        lm = model.lm
        await asyncio.to_thread(Grammar.compile, options, lm.tokenizer, lm.config.vocab_size, model.eos_token_ids)


@dataclass(frozen=True)
class Delta:
    """A piece of an answer."""

    kind: Literal["reasoning", "text"]
    text: str


class AnswerParser:
    """Splits the text of an answer, as it comes."""

    def __init__(self, generation_prefix: str, *, constrained: bool):
        """`generation_prefix`: what the template put at the start. A constrained text has no reasoning."""
        self._reasoning = None if constrained else ReasoningParser()
        if self._reasoning is not None:
            self._reasoning.push(generation_prefix)

    def push(self, text: str, *, finished: bool) -> list[Delta]:
        """Add text and return what is decided."""
        if self._reasoning is None:
            return [Delta("text", text)] if text else []
        parts = self._reasoning.push(text) + (self._reasoning.finish() if finished else [])
        return [Delta("reasoning" if reasoning else "text", part) for part, reasoning in parts]
