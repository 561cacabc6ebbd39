"""Conversations as token ids: the model's jinja template, a known format, or plain text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import NoReturn, Protocol

import jinja2
import jinja2.ext

from mlxlm.chat.chat_formats import CHAT_FORMATS
from mlxlm.chat.jinja_sandbox import BoundedEnvironment
from mlxlm.chat.placeholders import Placeholders
from mlxlm.chat.reasoning import open_think_tag
from mlxlm.generation import LoadedModel
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.bounded_reads import decode_utf8, read_bytes
from mlxlm.utils.errors import TokenizerError

PLAIN, MODEL = "plain", "model"
NAMES = (MODEL, *CHAT_FORMATS, PLAIN)
_LARGEST_TEMPLATE = 1 << 20  # bytes; the longest in use have 20,000


@dataclass(frozen=True)
class Message:
    """One message: role "system", "user" or "assistant". `ids`: the tokens of an answer that a model gave."""

    role: str
    content: str
    ids: tuple[int, ...] = ()


class ChatEncoder(Protocol):
    """Turns messages into ids.

    name: the template in use: "model" for the model's own, a name of FORMATS, "plain", or a file.
    eos_token_ids: tokens that end an answer, besides the model's own.
    generation_prefix: what it puts in front of every answer that is the model's to say ("<think>" and a line end), or "".
    """

    name: str
    eos_token_ids: frozenset[int]
    generation_prefix: str

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """The ids of the conversation, up to where the model's next answer begins."""
        ...


def chat_encoder(lm: LoadedModel, template: str | None = None) -> ChatEncoder:
    """The form of conversation that a model was trained for, or the one of `template`: "model", "plain", a name of
    FORMATS, or a jinja file.

    Of its own accord: the template in the model's files; without one, the format whose turns end with one of
    the model's end tokens; else plain text, which the model continues.
    Raises TokenizerError for a broken template, and for one that this tokenizer has no tokens for.
    """
    return chat_encoder_for(lm.tokenizer, lm.eos_token_ids, template)


def chat_encoder_for(tokenizer: Tokenizer, eos_token_ids: frozenset[int], template: str | None = None) -> ChatEncoder:
    """The same, of a model that need not be in memory: its tokenizer and the tokens that end its texts."""
    own = tokenizer.chat_template
    if template is None:
        fitting = [name for name, format in CHAT_FORMATS.items() if format.ends(tokenizer, eos_token_ids)]
        template = MODEL if own is not None else next(iter(fitting), PLAIN)
    if template == PLAIN:
        return PlainTextEncoder(tokenizer)
    if template == MODEL:
        if own is None:
            raise TokenizerError("this model has no chat template", "one of " + ", ".join(NAMES[1:]))
        return ChatTemplate(tokenizer)
    if template in CHAT_FORMATS:
        if not CHAT_FORMATS[template].has_tokens(tokenizer):
            needed = ", ".join(CHAT_FORMATS[template].tokens)
            raise TokenizerError(f"the template {template} takes the tokens {needed}, which this model lacks", PLAIN)
        return ChatTemplate(tokenizer, CHAT_FORMATS[template].template, template)
    return ChatTemplate(tokenizer, _read_template(Path(template)), template)


def _read_template(path: Path) -> str:
    if not path.exists():
        raise TokenizerError(f"there is no chat template {path}", f"one of {', '.join(NAMES)}, or a jinja file")
    content = read_bytes(path, _LARGEST_TEMPLATE, TokenizerError)
    return decode_utf8(content, str(path), TokenizerError, "a text in UTF-8", "utf-8-sig")


class PlainTextEncoder:
    """For a model without a template: the text so far, which the model continues.

    A person's text is continued where it ends; after an answer the next text begins on a new line.
    """

    name = PLAIN
    eos_token_ids: frozenset[int] = frozenset()
    generation_prefix = ""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
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
    """A model's jinja template, in the environment that transformers offers, and as untrusted: sandboxed, with bounded
    work and memory.

    What looks like a special token inside a message stays ordinary text, so that nobody can forge a role.
    An answer of the model is spliced in as the ids it consisted of: encoding its text again may give
    others (models don't always choose the encoder's split), and the key-value cache holds the former. Where
    the template changes an answer (trims it, drops its reasoning), the template's text counts.

    `eos_token_ids`: the special token that the template puts behind an answer, if any. `source`: the template.
    """

    def __init__(self, tokenizer: Tokenizer, source: str | None = None, name: str = MODEL):
        """`source`: a template instead of the model's own; `name`: what it is called.

        Raises TokenizerError for a template that can't be read, or fails on a question and an answer.
        """
        self.name = name
        self.source = tokenizer.chat_template if source is None else source
        self._tokenizer = tokenizer
        self._environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
        )
        self._environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            self._template = self._environment.from_string(self.source)
        except Exception as error:  # also RecursionError, for one that is nested deeply
            raise _broken(error, name) from error
        special = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self.eos_token_ids = self._find_eos_token_ids()
        self.generation_prefix = open_think_tag(self.render([Message("user", "?")]))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The conversation as text. Raises TokenizerError where the template fails or refuses it."""
        names = {f"{role}_token": name for role, name in self._tokenizer.special_token_names.items()}
        try:
            return self._environment.render(
                self._template,
                [{"role": m.role, "content": m.content} for m in messages],
                {"add_generation_prompt": add_generation_prompt, "tools": None, "documents": None, **names},
            )
        except Exception as error:  # a template is a program: it can fail with any error
            raise _broken(error, self.name) from error

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        placeholders, plain = self.escape_special_tokens(messages)
        answers = {n: placeholders.take(m.content, m.ids, answer=True) for n, m in enumerate(messages) if m.ids}

        @cache
        def rendered(spliced: tuple[int, ...]) -> str:
            shown = [replace(m, content=answers[n]) if n in spliced else m for n, m in enumerate(plain)]
            return self.render(shown, add_generation_prompt=add_generation_prompt)

        text = rendered(())
        wanted = placeholders.restore(text)

        def unchanged(group: tuple[int, ...]) -> tuple[int, ...]:
            """Those of these answers that the template leaves as they are; by halves, as most are or none is."""
            if not group or placeholders.restore(rendered(group)) == wanted:
                return group
            half = len(group) // 2
            return unchanged(group[:half]) + unchanged(group[half:]) if half else ()

        spliced = unchanged(tuple(n for n in answers if plain[n].content in text))
        spliced_text = rendered(spliced)
        if placeholders.restore(spliced_text) == wanted:
            text = spliced_text
        ids = self.encode_segments(list(placeholders.split(text)), placeholders)
        if add_generation_prompt and not ids:
            raise TokenizerError(f"{_called(self.name)} gives nothing for this conversation", _OTHERS)
        return ids

    def escape_special_tokens(self, messages: Sequence[Message]) -> tuple[Placeholders, list[Message]]:
        """The messages, a stand-in for everything in them that looks like a special token."""
        placeholders = Placeholders(self.source + "".join(m.content for m in messages))

        def shield(match: re.Match) -> str:
            return placeholders.take(match[0], self._encode(match[0], parse_special=False, continues=True))

        return placeholders, [replace(m, content=self.special.sub(shield, m.content)) for m in messages]

    def encode_segments(self, pieces: Sequence[str], placeholders: Placeholders, continues: bool = False) -> list[int]:
        """The ids of rendered text as `Placeholders.split` cuts it; `continues`: other text comes before it."""
        ids: list[int] = []
        for piece, following in zip_longest(pieces, pieces[1:], fillvalue=""):
            if piece in placeholders.ids:
                ids += placeholders.ids[piece]
                continue
            if following in placeholders.answers and self._tokenizer.adds_dummy_prefix:
                piece = piece.removesuffix(" ")  # the answer's first token has that space in front
            ids += self._encode(piece, parse_special=True, continues=continues or bool(ids))
        return ids

    def _encode(self, text: str, *, parse_special: bool, continues: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special, continues=continues)

    def _find_eos_token_ids(self) -> frozenset[int]:
        answer = Placeholders(self.source).take("", ())
        exchange = [Message("user", "?"), Message("assistant", answer)]
        behind = self.render(exchange, add_generation_prompt=False).partition(answer)[2]
        match = self.special.match(behind.lstrip())
        return frozenset([self._tokenizer.special_tokens[match[0]]] if match else [])


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %}: transformers' mark around answers, for training masks. Rendered as its content."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


_OTHERS = f"another template: {', '.join([*CHAT_FORMATS, PLAIN])}, or a jinja file"


def _called(name: str) -> str:
    return "the model's chat template" if name == MODEL else f"the chat template {name}"


def _broken(error: Exception, name: str) -> TokenizerError:
    where = f" at line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    reason = " ".join(str(error).split()) or type(error).__name__
    return TokenizerError(f"{_called(name)} failed{where}: {reason}", _OTHERS)
