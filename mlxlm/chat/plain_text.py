"""Conversations as plain text, for models without a chat template."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from mlxlm.chat.messages import Message, check_final_message, parse_tools
from mlxlm.chat.tool_formats import JSON_FORMAT, to_plain_messages
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import TokenizerError

PLAIN = "plain"


class PlainTextEncoder:
    """Encodes a conversation as one text for a model without a template.

    The model continues the user's text where it ends; after an answer, the next message starts on a new line.
    """

    name = PLAIN
    eos_token_ids: frozenset[int] = frozenset()
    generation_prefix = ""
    tool_format = JSON_FORMAT

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def encode(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        max_length: int = sys.maxsize,
    ) -> list[int]:
        """Return the ids of the conversation. See `ChatTemplate.encode`; an answer needs no generation prompt."""
        if continue_final_message:
            check_final_message(messages)
        if template_kwargs:
            problem = f"this model has no chat template, which {', '.join(template_kwargs)} could be for"
            raise TokenizerError(problem, "no options of the template")
        ids: list[int] = []
        text, last = "", "\n"
        for message in to_plain_messages(messages, parse_tools(tools or ()), system_role=True):
            if message.role != "assistant" and not last.endswith("\n"):
                text += "\n"
            if message.ids:
                ids += [*self._encode(text, not ids, max_length), *message.ids]
                text = ""
            else:
                text += message.content
            last = message.content or last
        return ids + self._encode(text, not ids, max_length)

    def generation_prefix_of(self, prompt: Sequence[int]) -> str:
        """Return ""; see `ChatTemplate.generation_prefix_of`."""
        return ""

    def _encode(self, text: str, first: bool, max_length: int) -> list[int]:
        return self._tokenizer.encode(text, continues=not first, max_length=max_length)
