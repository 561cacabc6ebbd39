"""The prompts of JSONL requests: text, token ids, or the messages of a chat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.generation.request import encode_prompt
from mlxlm.utils.errors import GenerationError

Messages = list[dict[str, str]]  # each with "role" and "content"
EncodedPrompt = tuple[Sequence[int], frozenset[int] | None]  # ids, and the end tokens, None for the model's

_ROLES = ("system", "user", "assistant")
EXAMPLE_MESSAGE = '{"role": "user", "content": "Hello!"}'


class PromptEncoder:
    """Encodes the prompts and messages of requests."""

    def __init__(
        self,
        lm: LoadedModel,
        encode_messages: Callable[[Messages], EncodedPrompt],
        *,
        as_chat: bool = False,
        system_prompt: str | None = None,
    ):
        """Encode for a model.

        Args:
            lm: The model.
            encode_messages: Applies the chat template. May raise any MlxlmError.
            as_chat: Whether a text prompt is a user message.
            system_prompt: The default system prompt of conversations.
        """
        self._lm = lm
        self._encode_messages = encode_messages
        self._as_chat = as_chat
        self._system_prompt = system_prompt

    def encode(self, value: dict[str, Any]) -> EncodedPrompt:
        """Encode "prompt" or "messages", and "system_prompt", of a request. Raises GenerationError for invalid ones."""
        prompt, messages, system_prompt = (value.get(name) for name in ("prompt", "messages", "system_prompt"))
        if (prompt is None) == (messages is None):
            raise GenerationError("a request has either a prompt or messages", '{"prompt": "Once upon a time"}')
        if system_prompt is not None and not isinstance(system_prompt, str):
            raise GenerationError("system_prompt is not a string", '"Be brief."')
        if messages is None:
            is_chat = self._as_chat and isinstance(prompt, str)
            if not self._as_chat and (system_prompt is not None or self._system_prompt):
                raise GenerationError("a prompt without a chat can't have a system prompt", "messages, or --chat")
            if not is_chat:
                return self._encode_prompt(prompt), None
            if not prompt:
                raise GenerationError("the message is empty", "some text to answer")
            messages = [{"role": "user", "content": prompt}]
        return self._encode_messages(self._with_system_prompt(_check_messages(messages), system_prompt))

    def _encode_prompt(self, prompt: Any) -> Sequence[int]:
        if isinstance(prompt, str):
            return encode_prompt(self._lm, prompt)
        is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
        if not is_ids or self._as_chat:
            raise GenerationError("the prompt is not a string", "a string; or without a chat, a list of token ids")
        return prompt  # `run_batch` checks whether the model has these ids

    def _with_system_prompt(self, messages: Messages, system_prompt: str | None) -> Messages:
        has_system_prompt = messages[0]["role"] == "system"
        if system_prompt is not None and has_system_prompt:
            raise GenerationError(
                "there are two system prompts", "system_prompt, or a first message with the role system"
            )
        system_prompt = self._system_prompt if system_prompt is None else system_prompt
        if system_prompt and not has_system_prompt:
            return [{"role": "system", "content": system_prompt}, *messages]
        return messages


def _check_messages(messages: Any) -> Messages:
    if not isinstance(messages, list) or not messages:
        raise GenerationError("messages is not a list of messages", f"[{EXAMPLE_MESSAGE}]")
    for number, message in enumerate(messages, 1):
        check_message(number, message)
    check_is_question(messages[-1]["role"])
    return messages


def check_message(number: int, message: Any) -> None:
    """Raise GenerationError if message `number`, from 1, isn't a role and a text."""
    if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
        raise GenerationError(f"message {number} must have a role and a content, nothing else", EXAMPLE_MESSAGE)
    if message["role"] not in _ROLES:
        raise GenerationError(f"message {number} has the role {message['role']!r}", "one of " + ", ".join(_ROLES))
    if not isinstance(message["content"], str):
        raise GenerationError(f"the content of message {number} is not a string", EXAMPLE_MESSAGE)


def check_is_question(role: str) -> None:
    """Raise GenerationError if the last message, of this role, can't be answered."""
    if role not in ("user", "tool"):
        raise GenerationError(
            "the last message is not the user's: there is nothing to answer", f"{EXAMPLE_MESSAGE} last"
        )
