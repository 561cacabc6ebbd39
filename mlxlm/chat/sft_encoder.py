"""Conversations as tokens for tuning: a template's, with the assistant's words told from all others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from mlxlm.chat.chat_formats import CHAT_FORMATS
from mlxlm.chat.chat_template import ChatTemplate, Message, chat_encoder_for
from mlxlm.chat.placeholders import Placeholders
from mlxlm.data import CHAT_TEMPLATE, ROLES, Chunk, Document, check_role
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import DataError, TokenizerError

_OWN_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")  # of CHAT_TEMPLATE
_CHARACTERS = 4  # of a token, about
_ROWS = 'rows such as {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


class SFTEncoder:
    """Makes the tokens of a conversation, and says which of them a model is to learn.

    Those are, of each of the assistant's turns, what follows the prompt that a chat gives the model, up to and with
    the token that ends the turn: what the model will have to say itself. Headers, other people's words and what a
    template puts behind a turn are read only. As in a chat, what looks like a special token inside a message is
    ordinary text.

    Attributes:
        chat_template: the jinja template.
        eos_token_ids: the tokens that end an answer.

    The template is that of `mlxlm.chat.chat_template.chat_encoder`; a tokenizer trained here that has none gets
    CHAT_TEMPLATE. Raises TokenizerError for a model that has no form of conversation, and for a template that doesn't
    mark where an answer ends.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: frozenset[int], chat_template: str | None = None):
        self._tokenizer = tokenizer
        self._form = self._chosen(tokenizer, eos_token_ids, chat_template)
        self.chat_template, self.eos_token_ids = self._form.source, self._form.eos_token_ids
        self._roles = ROLES if self.chat_template == CHAT_TEMPLATE else (*ROLES, "tool")
        if not self.eos_token_ids:
            raise TokenizerError(
                f"the chat template {self._form.name} puts no special token behind an answer, so that a model can't "
                "learn where one ends", "a jinja file that does"
            )  # fmt: skip

    @staticmethod
    def _chosen(tokenizer: Tokenizer, eos_token_ids: frozenset[int], chat_template: str | None) -> ChatTemplate:
        form = chat_encoder_for(tokenizer, eos_token_ids, chat_template)
        if isinstance(form, ChatTemplate):
            return form
        if chat_template is None and all(token in tokenizer.special_tokens for token in _OWN_TOKENS):
            return ChatTemplate(tokenizer, CHAT_TEMPLATE)
        fitting = [name for name, format in CHAT_FORMATS.items() if format.has_tokens(tokenizer)]
        hint = "--chat-template " + (" or ".join([*fitting, "FILE"])) + ", a jinja file with tokens that the model has"
        raise TokenizerError(f"{'plain text' if chat_template else 'this model'} has no turns to be learned", hint)

    def __call__(self, document: Document, room: int) -> Iterator[Chunk]:
        """A conversation as documents of at most `room` tokens: longer ones are cut in front of questions, and every
        piece begins with the system message. A question with its answers that is longer is a piece of its own, as long
        as it is. What comes after the last answer is left out.

        Raises DataError, naming file and line, for what is no conversation, or has no answer or an unknown role, and
        where the template refuses it or changes earlier turns when later ones come.
        """
        if document.messages is None:
            raise DataError(f"{document.location} is a text, not a conversation", _ROWS)
        for role, _ in document.messages:
            check_role(role, document.location, self._roles)
        system, rounds = _rounds([Message(role, content) for role, content in document.messages])
        if not rounds:
            raise DataError(f"{document.location} has no message of the assistant", _ROWS)
        while rounds:
            try:
                count, ids, loss_mask = self._fitting(system, rounds, room)
            except TokenizerError as error:
                begun = rounds[0][0].role == "assistant"
                hint = "a question in front of the assistant's first message" if begun else error.hint
                raise DataError(f"{document.location}: {error.message}", hint) from None
            said = sum(len(m.content.encode("utf-8")) for m in chain(*rounds[:count]) if m.role == "assistant")
            yield Chunk(np.array(ids, np.uint32), said, True, np.array(loss_mask, np.uint8))
            rounds = rounds[count:]

    def _fitting(
        self, system: list[Message], rounds: list[list[Message]], room: int
    ) -> tuple[int, list[int], list[int]]:
        """How many of the first rounds `room` holds, at least one, and what `encode` says of them."""
        size = count = 0
        while count < len(rounds) and (not count or size <= _CHARACTERS * room):
            size += sum(len(message.content) + 16 for message in rounds[count])  # 16: as much as a header
            count += 1
        found, too_many = None, len(rounds) + 1
        while found is None or (len(found[1]) <= room and found[0] + 1 < too_many):
            ids, loss_mask = self.encode([*system, *chain(*rounds[:count])])
            if len(ids) <= room or count == 1:
                found = count, ids, loss_mask
                count += 1
            else:
                too_many = count
                count = max(1, min(count - 1, count * room // len(ids)))
        return found

    def encode(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """The ids of a conversation, and for each 1 if it is to be learned, else 0. Raises TokenizerError."""
        placeholders, plain = self._form.escape_special_tokens(messages)
        if placeholders.restore(self._render(plain)) != self._render(messages):
            raise self._changes()  # it acts on what the stand-ins hide, such as <think>
        shown, contents = self._marked(plain, placeholders)
        text = self._render(shown)
        ids: list[int] = []
        loss_mask: list[int] = []

        def add(piece: str, label: int) -> None:
            pieces = list(placeholders.split(piece.translate(str.maketrans(contents))))
            more = self._form.encode_segments(pieces, placeholders, continues=bool(ids))
            ids.extend(more)
            loss_mask.extend([label] * len(more))

        at = 0
        for start, stop in self._spans(shown, text):
            add(text[at:start], 0)
            add(text[start:stop], 1)
            at = stop
        add(text[at:], 0)
        return ids, loss_mask

    def _render(self, messages: Sequence[Message], prompt: bool = False) -> str:
        return self._form.render(messages, add_generation_prompt=prompt)

    def _marked(self, plain: list[Message], placeholders: Placeholders) -> tuple[list[Message], dict[str, str]]:
        """The messages with a stand-in for what the assistant says, and what each stands for."""
        wanted = self._render(plain)
        for trimmed in (False, True):  # many templates trim
            contents: dict[str, str] = {}
            shown = list(plain)
            for n, message in enumerate(plain):
                if message.role == "assistant":
                    content = message.content.strip() if trimmed else message.content
                    mark = placeholders.take(content, (), answer=True)
                    contents[mark], shown[n] = content, replace(message, content=mark)
            text = self._render(shown)
            if text.translate(str.maketrans(contents)) == wanted and all(text.count(mark) == 1 for mark in contents):
                return shown, contents
        raise self._changes()

    def _changes(self) -> TokenizerError:
        problem = "leaves out or changes something that the assistant says (such as its reasoning)"
        return TokenizerError(f"the chat template {self._form.name} {problem}", "answers without it")

    def _spans(self, shown: list[Message], text: str) -> Iterator[tuple[int, int]]:
        """Where in `text` each of the assistant's turns is, from the end of the prompt to that of its end token."""
        ending = re.compile(rf"\s*({self._form.special.pattern})")
        for n, message in enumerate(shown):
            if message.role != "assistant":
                continue
            prompt, at = self._render(shown[:n], prompt=True), text.index(message.content)
            if not text.startswith(prompt) or at < len(prompt):
                raise TokenizerError(
                    f"the chat template {self._form.name} does not write message {n + 1} where a chat has it: earlier "
                    "ones change with those that come after", "a question and an answer each, without a system message"
                )  # fmt: skip
            end = ending.match(text, at + 1)
            if end is None or self._tokenizer.special_tokens[end[1]] not in self.eos_token_ids:
                problem = f"ends message {n + 1} with another token than an answer"
                raise TokenizerError(f"the chat template {self._form.name} {problem}", "another template")
            yield len(prompt), end.end()


def _rounds(messages: list[Message]) -> tuple[list[Message], list[list[Message]]]:
    """The system messages at the beginning, and what follows in parts that begin with a question and end with an
    answer, but for the first, which may begin with anything."""
    begin = next((n for n, m in enumerate(messages) if m.role != "system"), len(messages))
    rounds: list[list[Message]] = []
    current: list[Message] = []
    for message in messages[begin:]:
        if message.role == "user" and current and current[-1].role == "assistant":
            rounds.append(current)
            current = []
        current.append(message)
    while current and current[-1].role != "assistant":
        current.pop()
    return messages[:begin], [*rounds, current] if current else rounds
