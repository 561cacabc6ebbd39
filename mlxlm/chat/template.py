"""Conversations as token ids: the model's jinja template, or plain text for a model without one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NoReturn, Protocol

import jinja2
import jinja2.ext
import jinja2.sandbox

from mlxlm.errors import TokenizerError
from mlxlm.tokenizer import Tokenizer

# Supplementary Private Use Area-A: characters that text doesn't use, and no template looks for.
_PRIVATE_USE = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True)
class Message:
    """One message: role "system", "user" or "assistant". `ids`: the tokens of an answer that a model gave."""

    role: str
    content: str
    ids: tuple[int, ...] = ()


class Transcript(Protocol):
    """Turns messages into ids. `end_ids`: tokens that end an answer, besides the model's own."""

    end_ids: frozenset[int]

    def encode(self, messages: Sequence[Message]) -> list[int]:
        """The ids of the conversation, up to where the model's next answer begins."""
        ...


def transcript(tokenizer: Tokenizer) -> Transcript:
    """The form of conversation that a model was trained for. Raises TokenizerError for a broken template."""
    return PlainText(tokenizer) if tokenizer.chat_template is None else ChatTemplate(tokenizer)


class PlainText:
    """For a model without a template: the text so far, which the model continues.

    A person's text is continued where it ends; after an answer the next text begins on a new line.
    """

    end_ids: frozenset[int] = frozenset()

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def encode(self, messages: Sequence[Message]) -> list[int]:
        ids: list[int] = []
        text, last = "", "\n"
        for message in messages:
            if message.role != "assistant" and not last.endswith("\n"):
                text += "\n"
            if message.ids:
                ids += [*self._encode(text, first=not ids), *message.ids]
                text = ""
            else:
                text += message.content
            last = message.content or last
        return ids + self._encode(text, first=not ids)

    def _encode(self, text: str, first: bool) -> list[int]:
        return self._tokenizer.encode(text, continues=not first)


class ChatTemplate:
    """A model's jinja template, in the environment that transformers offers, and as untrusted: sandboxed.

    What looks like a special token inside a message stays ordinary text, so that nobody can forge a role.
    An answer of the model is spliced in as the ids it consisted of: encoding its text again may give
    others (models don't always choose the encoder's split), and the key-value cache holds the former.

    `end_ids`: the special token that the template puts behind an answer, if any.
    """

    def __init__(self, tokenizer: Tokenizer):
        """Raises TokenizerError for a template that can't be read, or fails on a question and an answer."""
        self._tokenizer = tokenizer
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            self._template = environment.from_string(tokenizer.chat_template)
        except jinja2.TemplateError as error:
            raise _broken(error) from error
        special = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self.end_ids = self._find_end_ids()

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The conversation as text. Raises TokenizerError where the template fails or refuses it."""
        names = {f"{role}_token": name for role, name in self._tokenizer.names.items()}
        try:
            return self._template.render(
                messages=[{"role": m.role, "content": m.content} for m in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **names,
            )
        except Exception as error:  # a template is a program: it can fail with any error
            raise _broken(error) from error

    def encode(self, messages: Sequence[Message]) -> list[int]:
        stand_ins = _StandIns(self._tokenizer.chat_template + "".join(m.content for m in messages))

        def shielded(match: re.Match) -> str:
            return stand_ins.take(match[0], self._encode(match[0], parse_special=False, continues=True))

        shielded_messages = [replace(m, content=self._special.sub(shielded, m.content)) for m in messages]
        spliced_messages = [
            replace(shown, content=stand_ins.take(m.content, m.ids, answer=True)) if m.ids else shown
            for m, shown in zip(messages, shielded_messages, strict=True)
        ]
        text = self.render(spliced_messages)
        plain = self.render(shielded_messages)
        if stand_ins.restored(text) != stand_ins.restored(plain):
            text = plain  # the template changes answers (trims them, drops their reasoning): its text counts
        ids: list[int] = []
        pieces = list(stand_ins.split(text))
        for piece, following in zip(pieces, [*pieces[1:], ""], strict=True):
            if piece in stand_ins.ids:
                ids += stand_ins.ids[piece]
                continue
            if following in stand_ins.answers and self._tokenizer.adds_first_space:
                piece = piece.removesuffix(" ")  # the answer's first token has that space in front
            ids += self._encode(piece, parse_special=True, continues=bool(ids))
        return ids

    def _encode(self, text: str, *, parse_special: bool, continues: bool) -> list[int]:
        return self._tokenizer.encode(
            text, add_special_tokens=False, parse_special=parse_special, continues=continues
        )

    def _find_end_ids(self) -> frozenset[int]:
        answer = _StandIns(self._tokenizer.chat_template).take("", ())
        exchange = [Message("user", "?"), Message("assistant", answer)]
        behind = self.render(exchange, add_generation_prompt=False).partition(answer)[2]
        match = self._special.match(behind.lstrip())
        return frozenset([self._tokenizer.special_tokens[match[0]]] if match else [])


class _StandIns:
    """Characters that stand, while a template is rendered, for texts whose ids are known already."""

    def __init__(self, text: str):
        """`text`: all that is rendered; its characters can't be taken."""
        used = set(text)
        self._free = (c for c in map(chr, _PRIVATE_USE) if c not in used)
        self._texts: dict[str, str] = {}
        self._taken: dict[str, str] = {}
        self.ids: dict[str, Sequence[int]] = {}
        self.answers: set[str] = set()

    def take(self, text: str, ids: Sequence[int], answer: bool = False) -> str:
        """The character that stands for `text`; the same one for the same text, unless it is an answer."""
        if not answer and text in self._taken:
            return self._taken[text]
        character = next(self._free, None)
        if character is None:
            raise TokenizerError("this conversation has too many answers", "a new one")
        self._texts[character], self.ids[character] = text, ids
        if answer:
            self.answers.add(character)
        else:
            self._taken[text] = character
        return character

    def restored(self, text: str) -> str:
        """`text` with every stand-in replaced by what it stands for."""
        return text.translate(str.maketrans(self._texts))

    def split(self, text: str) -> Iterator[str]:
        """The stand-ins in `text` and the stretches between them, in order."""
        pattern = f"([{''.join(self._texts)}])" if self._texts else "(?!)"
        return filter(None, re.split(pattern, text))


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %}: transformers' mark around answers, for training masks. Rendered as its content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
    # jinja's own filter escapes <, > and & for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, **layout)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _broken(error: Exception) -> TokenizerError:
    where = f" at line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    reason = " ".join(str(error).split())
    return TokenizerError(f"the model's chat template failed{where}: {reason}")
