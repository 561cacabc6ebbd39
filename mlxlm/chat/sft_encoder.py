"""Encodes conversations for supervised fine-tuning, with a loss mask over the assistant's tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from mlxlm.chat.chat_encoder import chat_encoder
from mlxlm.chat.chat_template import CHAT_FORMATS, ChatTemplate, Placeholders
from mlxlm.chat.messages import Message, ToolCall
from mlxlm.data import CHAT_TEMPLATE, Chunk, Document
from mlxlm.data.tokenize import check_role
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import DataError, TokenizerError

_CHAT_TEMPLATE_TOKENS = {"<|system|>", "<|user|>", "<|assistant|>", "<|end|>"}
_ROLES = ("system", "user", "assistant", "tool", "developer")
_CHARACTERS_PER_TOKEN = 4  # roughly
_ROW_HINT = 'rows such as {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


class SFTEncoder:
    """Encodes conversations and computes their loss masks.

    The loss mask covers what the model generates in a chat: of each assistant turn, everything after the prompt, up to
    and including the token that ends the turn, also tool calls. Headers, other roles, turns with the weight 0, and what
    the template puts behind a turn are masked out. So is the end of an earlier turn if it isn't an EOS token: GPT-OSS
    writes <|return|>, which later prompts have as <|end|>. As in a chat, text in a message that looks like a special
    token is ordinary text, and tools are shown as `ChatTemplate.render` shows them.

    The template is the one of `mlxlm.chat.chat_encoder.chat_encoder`; a tokenizer trained by mlxlm that has none uses
    CHAT_TEMPLATE.

    Attributes:
        chat_template: The jinja template.
        eos_token_ids: The tokens that end an answer.
        has_tools_as_text: Whether a conversation had tools or calls that the template doesn't know, see
            `ChatTemplate.render`.

    Raises:
        TokenizerError: The model has no chat template, or it doesn't mark where an answer ends.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: frozenset[int], chat_template: str | None = None):
        template = chat_encoder(tokenizer, eos_token_ids, chat_template)
        if not isinstance(template, ChatTemplate):
            if chat_template is not None or not tokenizer.special_tokens.keys() >= _CHAT_TEMPLATE_TOKENS:
                matching = [name for name, format in CHAT_FORMATS.items() if format.has_tokens(tokenizer)]
                names = " or ".join([*matching, "a jinja file with tokens that the model has"])
                raise TokenizerError(
                    f"{'plain text' if chat_template else 'this model'} has no assistant turns to train on",
                    f"`chat_template`: {names}",
                )
            template = ChatTemplate(tokenizer, CHAT_TEMPLATE)
        self._tokenizer, self._template, self.has_tools_as_text = tokenizer, template, False
        self.chat_template, self.eos_token_ids = self._template.source, self._template.eos_token_ids
        self._end_token_ids = eos_token_ids | self.eos_token_ids
        if not self.eos_token_ids:
            problem = "puts no special token after an answer, so that a model can't learn where it ends"
            raise TokenizerError(f"the chat template {self._template.name} {problem}", "a jinja file that does")

    def __call__(self, document: Document, max_tokens: int) -> Iterator[Chunk]:
        """Encode a conversation as chunks of at most `max_tokens` tokens.

        Longer conversations are split before questions, and every chunk starts with the system message. A question with
        its answers that is longer by itself is one longer chunk. Messages after the last answer are left out.

        Raises:
            DataError: The row is not a conversation, has no answer or an unknown role, or the template refuses it or
                changes earlier turns when later ones follow. The message names file and line.
        """
        if document.messages is None:
            raise DataError(f"{document.location} is a text, not a conversation", _ROW_HINT)
        if document.rejected is not None:
            raise DataError(f"{document.location} is a preference, not a conversation", "`loss=dpo`, orpo or kto")
        try:
            messages = [Message.from_dict(message) for message in document.messages]
        except TokenizerError as error:
            raise error.prefixed(document.location, DataError) from None
        for message in messages:
            check_role(message.role, document.location, _ROLES)
        last = max((n for n, message in enumerate(messages) if _is_learned(message)), default=None)
        if last is None:
            weights = " with the weight 1" if any(message.role == "assistant" for message in messages) else ""
            raise DataError(f"{document.location} has no message of the assistant{weights}", _ROW_HINT)
        has_tools = document.tools or any(message.tool_calls or message.role == "tool" for message in messages)
        self.has_tools_as_text |= bool(has_tools) and not self._template.has_tools
        system, rounds = _rounds(messages[: last + 1])
        while rounds:
            try:
                count, ids, loss_mask = self._encode_first(system, rounds, document.tools, max_tokens)
            except TokenizerError as error:
                starts_with_answer = rounds[0][0].role == "assistant"
                hint = "a question in front of the assistant's first message" if starts_with_answer else error.hint
                raise DataError(f"{document.location}: {error.message}", hint) from None
            if any(loss_mask):
                text_bytes = sum(_num_bytes(message) for message in chain(*rounds[:count]) if _is_learned(message))
                yield Chunk(np.array(ids, np.uint32), text_bytes, True, np.array(loss_mask, np.uint8))
            rounds = rounds[count:]

    def _encode_first(
        self, system: list[Message], rounds: list[list[Message]], tools: Sequence[Any] | None, max_tokens: int
    ) -> tuple[int, list[int], list[int]]:
        """Encode as many first rounds as fit `max_tokens`, at least one; return their number, ids and mask."""
        size = count = 0
        while count < len(rounds) and (not count or size <= _CHARACTERS_PER_TOKEN * max_tokens):
            size += sum(_num_bytes(message) + 16 for message in rounds[count])  # 16: as much as a header
            count += 1
        best, too_many = None, len(rounds) + 1
        while best is None or (len(best[1]) <= max_tokens and best[0] + 1 < too_many):
            ids, loss_mask = self.encode([*system, *chain(*rounds[:count])], tools)
            if len(ids) <= max_tokens or count == 1:
                best = count, ids, loss_mask
                count += 1
            else:
                too_many = count
                count = max(1, min(count - 1, count * max_tokens // len(ids)))
        return best

    def encode(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> tuple[list[int], list[int]]:
        """Return the ids of a conversation and its loss mask (1: trained on, 0: not). Raise TokenizerError."""
        placeholders, plain, plain_tools = self._template.escape_special_tokens(messages, list(tools or ()))
        render = partial(self._template.render, tools=plain_tools)
        text = placeholders.restore(render(plain, add_generation_prompt=False))
        original = self._template.render(messages, tools=tools, add_generation_prompt=False)
        reasoning = (m.reasoning_content or "" for m in messages if _is_learned(m))
        if text != original or not all(r.strip() in text for r in reasoning):
            raise self._changes_answers()  # it looks for text that the placeholders hide, such as <think>
        messages, contents = self._with_placeholders(plain, placeholders, render)
        text = render(messages, add_generation_prompt=False)
        ids: list[int] = []
        loss_mask: list[int] = []

        def add(piece: str, label: int) -> None:
            pieces = list(placeholders.split(piece.translate(contents)))
            more = self._template.encode_segments(pieces, placeholders, continues=bool(ids))
            ids.extend(more)
            loss_mask.extend([label] * len(more))

        position = 0
        for start, stop in self._spans(messages, text, render):
            add(text[position:start], 0)
            add(text[start:stop], 1)
            position = stop
        add(text[position:], 0)
        return ids, loss_mask

    def _with_placeholders(
        self, plain: list[Message], placeholders: Placeholders, render: Callable[..., str]
    ) -> tuple[list[Message], dict[int, str]]:
        """Replace the texts to learn with placeholders; return the messages and the text of each placeholder's code."""
        expected = render(plain, add_generation_prompt=False)
        for trimmed in (False, True):  # many templates trim
            contents: dict[int, str] = {}
            shown = list(plain)
            for n, message in enumerate(plain):
                if _is_learned(message) and (message.content or not message.tool_calls):
                    content = message.content.strip() if trimmed else message.content
                    placeholder = placeholders.take(content, (), answer=True)
                    contents[ord(placeholder)], shown[n] = content, replace(message, content=placeholder)
            text = render(shown, add_generation_prompt=False)
            if text.translate(contents) == expected and all(text.count(chr(code)) == 1 for code in contents):
                return shown, contents
        raise self._changes_answers()

    def _changes_answers(self) -> TokenizerError:
        problem = "leaves out or changes something that the assistant says (such as its reasoning)"
        return TokenizerError(f"the chat template {self._template.name} {problem}", "answers without it")

    def _spans(self, shown: list[Message], text: str, render: Callable[..., str]) -> Iterator[tuple[int, int]]:
        """Yield the span in `text` of each turn to learn: what follows its prompt, up to the end of its EOS token."""
        format = self._template.tool_format
        in_calls = format.render([ToolCall("", "f", '{"argument": ""}')] * 2)
        for n, message in enumerate(shown):
            if not _is_learned(message):
                continue
            prompt = render(shown[:n])
            at = text.index(message.content) if message.content else len(prompt)
            if not text.startswith(prompt) or at < len(prompt):
                problem = f"changes earlier messages depending on later ones (at message {n + 1})"
                hint = "a question and an answer each, without a system message"
                raise TokenizerError(f"the chat template {self._template.name} {problem}", hint)
            behind = at + len(message.content)
            tokens = list(self._template.special.finditer(text, behind))
            if message.tool_calls:  # they can follow special tokens around reasoning
                calls = text.find(format.trigger, len(prompt))
                tokens = [token for token in tokens if token[0] not in in_calls and token.start() > calls >= 0]
            end = next(iter(tokens), None)
            is_eos = end is not None and self._tokenizer.special_tokens[end[0]] in self._end_token_ids
            if (
                end is None
                or not (is_eos or message is not shown[-1])
                or (text[behind : end.start()].strip() and not message.tool_calls)
            ):
                problem = f"ends message {n + 1} with another token than an answer"
                raise TokenizerError(f"the chat template {self._template.name} {problem}", "another template")
            yield len(prompt), end.end() if is_eos else end.start()


def _is_learned(message: Message) -> bool:
    return message.role == "assistant" and message.weight == 1


def _num_bytes(message: Message) -> int:
    """Size of what a message says, without markup."""
    calls = chain.from_iterable((call.name, call.arguments) for call in message.tool_calls)
    return len("".join((message.content, message.reasoning_content or "", *calls)).encode("utf-8", "replace"))


def _rounds(messages: list[Message]) -> tuple[list[Message], list[list[Message]]]:
    """Split a conversation into its first system messages and its rounds.

    A round starts with a question (the first may start with any role) and ends with an answer, as the whole does.
    """
    start = next((n for n, m in enumerate(messages) if m.role != "system"), len(messages))
    rounds: list[list[Message]] = []
    current: list[Message] = []
    for message in messages[start:]:
        if message.role == "user" and current and current[-1].role == "assistant":
            rounds.append(current)
            current = []
        current.append(message)
    return messages[:start], [*rounds, current]
