"""Encodes conversations: which template a model has, plain text for one without, and the tokens that end an answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Unpack

from mlxlm.chat.chat_template import CHAT_FORMATS, MODEL, NAMES, PLAIN, ChatTemplate, RenderOptions
from mlxlm.chat.messages import Message, check_final_message, parse_tools
from mlxlm.chat.reasoning import HARMONY, THINK
from mlxlm.chat.tool_calls import JSON_FORMAT, to_plain_messages
from mlxlm.generation import LoadedModel
from mlxlm.generation.jsonl import EXAMPLE_MESSAGE, EncodedPrompt, check_is_question, check_message
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.bounded_reads import decode_utf8, read_bytes
from mlxlm.utils.errors import GenerationError, TokenizerError

Messages = Sequence[Message | Mapping[str, Any]]  # a mapping has "role" and "content"
MessageEncoder = Callable[[Messages], EncodedPrompt]
_MAX_TEMPLATE_BYTES = 1 << 20  # the longest in use have 20,000


class PlainTextEncoder:
    """Encodes a conversation as one text for a model without a template.

    The model continues the user's text where it ends; after an answer, the next message starts on a new line.
    """

    name = PLAIN
    eos_token_ids: frozenset[int] = frozenset()
    generation_prefix = ""
    may_reason = has_effort = False
    reasoning_tags = THINK
    skip_special_tokens = True
    tool_format = JSON_FORMAT

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def encode(
        self, messages: Sequence[Message], *, max_length: int = sys.maxsize, **options: Unpack[RenderOptions]
    ) -> list[int]:
        """Return the ids of the conversation. See `ChatTemplate.encode`; an answer needs no generation prompt."""
        if options.get("continue_final_message"):
            check_final_message(messages)
        if template_kwargs := options.get("template_kwargs"):
            problem = f"this model has no chat template, which {', '.join(template_kwargs)} could be for"
            raise TokenizerError(problem, "no options of the template")
        ids: list[int] = []
        text, last = "", "\n"
        for message in to_plain_messages(messages, parse_tools(options.get("tools") or ()), system_role=True):
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

    def start_of_answer(self, prompt: Sequence[int]) -> list[int]:
        """Return []; see `ChatTemplate.start_of_answer`."""
        return []

    def _encode(self, text: str, first: bool, max_length: int) -> list[int]:
        return self._tokenizer.encode(text, continues=not first, max_length=max_length)


ChatEncoder = PlainTextEncoder | ChatTemplate


def chat_encoder(tokenizer: Tokenizer, eos_token_ids: frozenset[int], template: str | None = None) -> ChatEncoder:
    """Return the encoder for a model.

    By default it uses the template in the model's files; without one, the known format whose turns end with one of the
    model's EOS tokens; otherwise plain text, which the model continues.

    Args:
        tokenizer: The model's tokenizer.
        eos_token_ids: The model's EOS tokens.
        template: "model", "plain", a name in `CHAT_FORMATS`, or a jinja file.

    Raises:
        TokenizerError: The template is broken, or the tokenizer lacks its tokens.
    """
    if template is None:
        matching = [name for name, format in CHAT_FORMATS.items() if format.ends(tokenizer, eos_token_ids)]
        template = MODEL if tokenizer.chat_template is not None else next(iter(matching), PLAIN)
    if template == PLAIN:
        return PlainTextEncoder(tokenizer)
    if template == MODEL:
        return ChatTemplate(tokenizer)
    if template in CHAT_FORMATS:
        if not CHAT_FORMATS[template].has_tokens(tokenizer):
            needed = ", ".join(CHAT_FORMATS[template].tokens)
            raise TokenizerError(f"the template {template} needs the tokens {needed}, which this model lacks", PLAIN)
        return ChatTemplate(tokenizer, CHAT_FORMATS[template].template, template)
    return ChatTemplate(tokenizer, _read_template(Path(template)), template)


def _read_template(path: Path) -> str:
    if not path.exists():
        raise TokenizerError(f"there is no chat template {path}", f"one of {', '.join(NAMES)}, or a jinja file")
    content = read_bytes(path, _MAX_TEMPLATE_BYTES, TokenizerError)
    return decode_utf8(content, str(path), TokenizerError, "a text in UTF-8", "utf-8-sig")


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
    """The tokens that end an answer: those of the model, and that of its chat template.

    In the harmony format <|end|> doesn't: it ends a message of the answer.
    """
    ends = lm.eos_token_ids | {id for id in encoder.eos_token_ids if id < lm.config.vocab_size}
    return ends - {lm.tokenizer.special_tokens.get("<|end|>")} if encoder.reasoning_tags is HARMONY else ends


def message_encoder(lm: LoadedModel, chat_template: str | None = None, compile_now: bool = False) -> MessageEncoder:
    """A function that encodes conversations, up to where the answer begins.

    Args:
        lm: The model.
        chat_template: See `chat_encoder`; "plain" only if it is asked for.
        compile_now: Compile the template now, not with the first conversation. Its errors are raised by either.

    Returns:
        A function that encodes a conversation, with the tokens that end the answer. It raises GenerationError for
        invalid messages and a model without a chat template, TokenizerError if the template is broken or refuses the
        conversation.
    """

    @cache
    def encoder() -> ChatEncoder:
        compiled = chat_encoder(lm.tokenizer, lm.eos_token_ids, chat_template)
        if chat_template is None and compiled.name == PLAIN:
            hint = "a prompt to continue, or `chat_template=chatml`"
            raise GenerationError(f"{lm.path} has no chat template", hint, is_operator_hint=True)
        return compiled

    def encode(messages: Messages) -> EncodedPrompt:
        parsed = parse_messages(messages)
        if not parsed:
            raise GenerationError("there are no messages", f"[{EXAMPLE_MESSAGE}]")
        check_is_question(parsed[-1].role)
        found = encoder()
        ids, ends = found.encode(parsed), answer_eos_token_ids(lm, found)
        return EncodedPrompt(ids, ends, found.skip_special_tokens, found.start_of_answer(ids))

    if compile_now:
        encoder()
    return encode
