"""The prompts of conversations: messages, encoded with the model's chat template."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from mlxlm.chat.chat_template import ChatEncoder, chat_encoder
from mlxlm.chat.messages import Message
from mlxlm.chat.plain_text import PLAIN
from mlxlm.generation import LoadedModel
from mlxlm.generation.jsonl.prompts import EXAMPLE_MESSAGE, check_is_question, check_message
from mlxlm.utils.errors import GenerationError

Messages = Sequence[Message | Mapping[str, Any]]  # a mapping has "role" and "content"
MessageEncoder = Callable[[Messages], tuple[Sequence[int], frozenset[int]]]


def parse_messages(messages: Messages) -> list[Message]:
    """Parse the messages of a conversation: a Message each, or a dict with its role and content.

    Raises:
        GenerationError: For anything else.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise GenerationError("messages is not a list of messages", f"[{EXAMPLE_MESSAGE}]")
    parsed = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Message):
            check_message(number, message)
            message = Message(message["role"], message["content"])
        parsed.append(message)
    return parsed


def answer_eos_token_ids(lm: LoadedModel, encoder: ChatEncoder) -> frozenset[int]:
    """The tokens that end an answer: those of the model, and that of its chat template."""
    return lm.eos_token_ids | {id for id in encoder.eos_token_ids if id < lm.config.vocab_size}


def message_encoder(lm: LoadedModel, chat_template: str | None = None, compile_now: bool = False) -> MessageEncoder:
    """A function that encodes conversations, up to where the answer begins.

    Args:
        lm: The model.
        chat_template: See `chat_encoder`; "plain" only if it is asked for.
        compile_now: Compile the template now, not with the first conversation. Its errors are raised by either.

    Returns:
        A function that returns the ids of a conversation, and the tokens that end the answer. It raises
        GenerationError for invalid messages and a model without a chat template, TokenizerError if the template is
        broken or refuses the conversation.
    """

    @cache
    def encoder() -> ChatEncoder:
        compiled = chat_encoder(lm.tokenizer, lm.eos_token_ids, chat_template)
        if chat_template is None and compiled.name == PLAIN:
            hint = 'a prompt to continue, or --chat-template (in Python chat_template="chatml")'
            raise GenerationError(f"{lm.path} has no chat template", hint, is_operator_hint=True)
        return compiled

    def encode(messages: Messages) -> tuple[Sequence[int], frozenset[int]]:
        parsed = parse_messages(messages)
        if not parsed:
            raise GenerationError("there are no messages", f"[{EXAMPLE_MESSAGE}]")
        check_is_question(parsed[-1].role)
        return encoder().encode(parsed), answer_eos_token_ids(lm, encoder())

    if compile_now:
        encoder()
    return encode
