"""Chat templates: encode conversations with the model's jinja template, a known format, or as plain text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import NoReturn

import jinja2
import jinja2.ext

from mlxlm.chat.chat_formats import CHAT_FORMATS
from mlxlm.chat.jinja_sandbox import BoundedEnvironment
from mlxlm.chat.placeholders import Placeholders
from mlxlm.chat.reasoning import open_think_tag
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.bounded_reads import decode_utf8, read_bytes
from mlxlm.utils.errors import TokenizerError

PLAIN, MODEL = "plain", "model"
NAMES = (MODEL, *CHAT_FORMATS, PLAIN)
_MAX_TEMPLATE_BYTES = 1 << 20  # the longest in use have 20,000


@dataclass(frozen=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: "system", "user" or "assistant".
        content: The text.
        ids: Tokens of a generated answer, if known.
    """

    role: str
    content: str
    ids: tuple[int, ...] = ()


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


class PlainTextEncoder:
    """Encodes a conversation as one text for a model without a template.

    The model continues the user's text where it ends; after an answer, the next message starts on a new line.
    """

    name = PLAIN
    eos_token_ids: frozenset[int] = frozenset()
    generation_prefix = ""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Return the ids of the conversation."""
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
    """A jinja chat template with the globals that transformers offers, rendered in a sandbox.

    Text in a message that looks like a special token stays ordinary text, so that nobody can forge a role. A generated
    answer is spliced in as its original ids: encoding its text again may give others (models don't always choose the
    encoder's split), and the key-value cache holds the original ones. If the template changes an answer (trims it,
    drops its reasoning), the template's text counts.

    Attributes:
        name: "model" for the model's own template, a name in `CHAT_FORMATS`, or a file.
        source: The template.
        special: Pattern that matches the tokenizer's special tokens.
        eos_token_ids: The special token that the template puts behind an answer, if any.
        generation_prefix: What the template puts at the start of an answer, such as "<think>" and a line feed, or "".
    """

    def __init__(self, tokenizer: Tokenizer, source: str | None = None, name: str = MODEL):
        """Compile `source` (by default the model's own template), called `name` in errors.

        Raises:
            TokenizerError: There is no template, it has syntax errors, or it fails on a question and an answer.
        """
        source = tokenizer.chat_template if source is None else source
        if source is None:
            raise TokenizerError("this model has no chat template", "one of " + ", ".join(NAMES[1:]))
        self.name, self.source, self._tokenizer = name, source, tokenizer
        self._environment = BoundedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
        )
        self._environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        try:
            self._template = self._environment.from_string(self.source)
        except Exception as error:  # also RecursionError, for one that is nested deeply
            raise _template_error(error, name) from error
        special = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        self.eos_token_ids = self._find_eos_token_ids()
        self.generation_prefix = open_think_tag(self.render([Message("user", "?")]))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Return the conversation as text. Raise TokenizerError if the template fails or refuses it."""
        names = {f"{role}_token": name for role, name in self._tokenizer.special_token_names.items()}
        try:
            return self._environment.render(
                self._template,
                [{"role": m.role, "content": m.content} for m in messages],
                {"add_generation_prompt": add_generation_prompt, "tools": None, "documents": None, **names},
            )
        except Exception as error:  # a template is a program: it can fail with any error
            raise _template_error(error, self.name) from error

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> list[int]:
        """Return the ids of the conversation. Raise TokenizerError if the template fails or refuses it."""
        placeholders, plain = self.escape_special_tokens(messages)
        answers = {n: placeholders.take(m.content, m.ids, answer=True) for n, m in enumerate(messages) if m.ids}

        @cache
        def rendered(spliced: tuple[int, ...]) -> str:
            shown = [replace(m, content=answers[n]) if n in spliced else m for n, m in enumerate(plain)]
            return self.render(shown, add_generation_prompt=add_generation_prompt)

        text = rendered(())
        expected = placeholders.restore(text)

        def unchanged(group: tuple[int, ...]) -> tuple[int, ...]:
            """Return the answers that the template doesn't change, by bisection: usually all or none."""
            if not group or placeholders.restore(rendered(group)) == expected:
                return group
            half = len(group) // 2
            return unchanged(group[:half]) + unchanged(group[half:]) if half else ()

        spliced = unchanged(tuple(n for n in answers if plain[n].content in text))
        spliced_text = rendered(spliced)
        if placeholders.restore(spliced_text) == expected:
            text = spliced_text
        ids = self.encode_segments(list(placeholders.split(text)), placeholders)
        if add_generation_prompt and not ids:
            raise TokenizerError(f"{_describe(self.name)} renders this conversation as an empty text", _HINT)
        return ids

    def escape_special_tokens(self, messages: Sequence[Message]) -> tuple[Placeholders, list[Message]]:
        """Replace everything in the messages that looks like a special token with placeholders."""
        placeholders = Placeholders(self.source + "".join(m.content for m in messages))

        def escape(match: re.Match[str]) -> str:
            return placeholders.take(match[0], self._encode(match[0], parse_special=False, continues=True))

        return placeholders, [replace(m, content=self.special.sub(escape, m.content)) for m in messages]

    def encode_segments(self, pieces: Sequence[str], placeholders: Placeholders, continues: bool = False) -> list[int]:
        """Encode rendered text that `Placeholders.split` has split. `continues`: other text comes before it."""
        ids: list[int] = []
        for piece, next_piece in zip_longest(pieces, pieces[1:], fillvalue=""):
            if piece in placeholders.ids:
                ids += placeholders.ids[piece]
                continue
            if next_piece in placeholders.answers and self._tokenizer.adds_dummy_prefix:
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


ChatEncoder = PlainTextEncoder | ChatTemplate


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %}, which marks answers for training masks in transformers. Only its content is rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the nodes inside the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


_HINT = f"another template: {', '.join([*CHAT_FORMATS, PLAIN])}, or a jinja file"


def _describe(name: str) -> str:
    return "the model's chat template" if name == MODEL else f"the chat template {name}"


def _template_error(error: Exception, name: str) -> TokenizerError:
    where = f" at line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    reason = " ".join(str(error).split()) or type(error).__name__
    return TokenizerError(f"{_describe(name)} failed{where}: {reason}", _HINT)
