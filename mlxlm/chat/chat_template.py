"""Chat templates: the jinja template of a model or a known format, rendered in a sandbox and encoded."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, cached_property, lru_cache, partial
from itertools import zip_longest
from typing import Any, NoReturn, TypedDict, Unpack

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlxlm.chat.harmony import CALL
from mlxlm.chat.messages import Message, Tool, check_final_message, map_strings, parse_tools
from mlxlm.chat.reasoning import HARMONY, THINK, effort_variables, reasoning_tags, split
from mlxlm.chat.tool_calls import JSON_FORMAT, MessageStyle, ToolFormat, derive_format, number_calls, to_plain_messages
from mlxlm.tokenizer import Tokenizer
from mlxlm.tokenizer.tokenizer import check_length
from mlxlm.utils.errors import TokenizerError

MODEL, PLAIN = "model", "plain"
_MAX_TAG_TOKENS = 16  # of an opening tag and the line feeds after it: one for each byte of <think>, at most
_MAX_DATE_FORMAT = 100  # characters
# Supplementary Private Use Area-A: characters that text doesn't use, and no template looks for.
_PRIVATE_USE = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True)
class ChatFormat:
    """A jinja template and its special tokens; the last of `tokens` ends a turn."""

    template: str
    tokens: tuple[str, ...]

    def has_tokens(self, tokenizer: Tokenizer) -> bool:
        """Whether the tokenizer has all tokens of the format."""
        return all(token in tokenizer.special_tokens for token in self.tokens)

    def ends(self, tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> bool:
        """Whether a model with these EOS tokens was trained on this format.

        A base model often has the tokens of its chat variant without having learned them, but another EOS token.
        """
        return self.has_tokens(tokenizer) and tokenizer.special_tokens[self.tokens[-1]] in eos_token_ids


# For models without a template: OpenAI's ChatML (Qwen, Yi, SmolLM and many others), and the formats in the model cards
# of Llama 3 and Gemma.
CHAT_FORMATS = {
    "chatml": ChatFormat(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
    ),
    "llama3": ChatFormat(
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    # Gemma has no system role: Google puts such text in front of the first message.
    "gemma": ChatFormat(
        "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
        "{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}{% else %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ ns.system }}{{ m.content }}<end_of_turn>\n"
        "{% set ns.system = '' %}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<start_of_turn>", "<end_of_turn>"),
    ),
}
NAMES = (MODEL, *CHAT_FORMATS, PLAIN)


class RenderOptions(TypedDict, total=False):
    """The arguments of `ChatTemplate.render`, without the conversation."""

    add_generation_prompt: bool
    tools: Sequence[Any] | None
    continue_final_message: bool
    template_kwargs: Mapping[str, Any] | None


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
        may_reason: Whether the template knows reasoning.
        has_effort: Whether the template reads a reasoning effort.
        reasoning_tags: How the model writes reasoning: as in its template, or between <think> and </think>.
        skip_special_tokens: Whether special tokens aren't part of an answer: unless reasoning is written with them.
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
        self._token_names = {f"{role}_token": name for role, name in tokenizer.special_token_names.items()}
        try:
            self._template = _compile(source)
        except Exception as error:  # also RecursionError, for one that is nested deeply
            raise _template_error(error, name) from error
        special = sorted(tokenizer.special_tokens, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, special)) or "(?!)")
        tags = reasoning_tags(source)
        self.may_reason, self.reasoning_tags = tags is not None, tags or THINK
        has_key = "reasoning_content" in source or not re.search(r"\bthinking\b", source)
        self._reasoning_key = "reasoning_content" if has_key else "thinking"  # GPT-OSS, LFM2.5
        self.has_effort = any(name in source for name in effort_variables("none"))
        self.skip_special_tokens = not self.special.search(self.reasoning_tags.open)
        self.eos_token_ids = self._find_eos_token_ids()
        self.generation_prefix = self.reasoning_tags.open_tag(self.render([Message("user", "?")]))

    @property
    def has_tools(self) -> bool:
        """Whether the template shows tools, calls and results."""
        return self._tool_support is not None

    @property
    def tool_format(self) -> ToolFormat:
        """How the model writes calls: as in its template, or in `JSON_FORMAT` if that shows no tools."""
        return self._tool_support[0] if self._tool_support else JSON_FORMAT

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the conversation as text.

        Args:
            messages: The conversation.
            add_generation_prompt: End with the header of an answer.
            tools: Functions that the model can call, in OpenAI's form. A template that doesn't know tools gets them as
                text in the system message, and calls and results as text in `JSON_FORMAT`.
            continue_final_message: End with the text of the last message, an answer that the model continues.
            template_kwargs: More variables of the template, such as `enable_thinking`.

        Raises:
            TokenizerError: The template fails or refuses the conversation, or an argument is invalid.
        """
        messages = self._completed(messages)
        self._check_kwargs(template_kwargs or {})
        values = {**(template_kwargs or {}), "add_generation_prompt": add_generation_prompt}
        end = ""
        if continue_final_message:
            check_final_message(messages)
            *others, last = messages
            end = self._placeholders([*messages, tools, template_kwargs]).take("", ())
            messages = [*others, replace(last, content=last.content + end)]
            values["add_generation_prompt"] = False
        parsed = parse_tools(tools or ())
        support = self._tool_support if parsed or any(m.tool_calls or m.role == "tool" for m in messages) else None
        if support is None:
            messages, parsed = to_plain_messages(messages, parsed, not parsed or self._has_system_role), ()
        elif support[1].numbered_ids:
            messages = number_calls(messages)
        try:
            text = self._render(messages, parsed, support[1] if support else MessageStyle(), values)
        except TokenizerError as error:
            if any(m.role == "system" for m in messages) and not self._has_system_role:
                problem = f"{_describe(self.name)} refuses a system message"
                raise TokenizerError(problem, "the same text in the user's first message") from error
            raise
        if end not in text:
            raise TokenizerError(f"{_describe(self.name)} leaves out the last message", "a question after it")
        return text.rpartition(end)[0] if end else text

    def encode(
        self, messages: Sequence[Message], *, max_length: int = sys.maxsize, **options: Unpack[RenderOptions]
    ) -> list[int]:
        """Return the ids of the conversation. See `render` for `options`, `Tokenizer.encode` for `max_length`."""
        placeholders, plain, escaped = self.escape_special_tokens(messages, options)
        answers = {n: placeholders.take(m.content, m.ids, answer=True) for n, m in enumerate(messages) if m.ids}

        @cache
        def rendered(spliced: tuple[int, ...]) -> str:
            shown = [replace(m, content=answers[n]) if n in spliced else m for n, m in enumerate(plain)]
            return self.render(shown, **escaped)

        text = rendered(())
        expected = placeholders.restore(text) if answers else ""

        def unchanged(group: tuple[int, ...]) -> tuple[int, ...]:
            """Return the answers that the template doesn't change, by bisection: usually all or none."""
            if not group or placeholders.restore(rendered(group)) == expected:
                return group
            half = len(group) // 2
            return unchanged(group[:half]) + unchanged(group[half:]) if half else ()

        spliced = unchanged(tuple(n for n in answers if plain[n].content in text))
        spliced_text = rendered(spliced)
        if spliced and placeholders.restore(spliced_text) == expected:
            text = spliced_text
        ids = self.encode_segments(list(placeholders.split(text)), placeholders, max_length=max_length)
        if not ids and options.get("add_generation_prompt", True):
            problem = f"{_describe(self.name)} renders this conversation as an empty text"
            raise TokenizerError(problem, _HINT, is_operator_hint=True)
        return ids

    def generation_prefix_of(self, prompt: Sequence[int]) -> str:
        """Return what the template put at the start of the answer to `prompt`, which depends on its variables.

        In the harmony format, the header of an answer that `prompt` already has the beginning of.
        """
        tail = self._tokenizer.decode(prompt[-_MAX_TAG_TOKENS:], skip_special_tokens=False)
        if self.reasoning_tags is HARMONY:
            return "" if tail.endswith("<|start|>assistant") else HARMONY.answer
        return self.reasoning_tags.open_tag(tail)

    def start_of_answer(self, prompt: Sequence[int]) -> list[int]:
        """Return what has to follow `prompt` so that an answer comes next, without reasoning."""
        text = self.reasoning_tags.start_of_answer(self.generation_prefix_of(prompt))
        return self._encode(text, parse_special=True, continues=True)

    def escape_special_tokens(
        self, messages: Sequence[Message], options: Any = None
    ) -> tuple[Placeholders, list[Message], Any]:
        """Replace everything in messages and JSON `options` that looks like a special token with placeholders."""
        placeholders = self._placeholders([*messages, options])

        @cache
        def escape(text: str) -> str:
            return placeholders.take(text, self._encode(text, parse_special=False, continues=True))

        *plain, options = map_strings(
            [*messages, options], lambda text: self.special.sub(lambda match: escape(match[0]), text)
        )
        return placeholders, plain, options

    def _placeholders(self, values: list[Any]) -> Placeholders:
        """Return placeholders that occur neither in the template nor in `values`."""
        used = [self.source]

        def use(text: str) -> str:
            used.append(text)
            return text

        map_strings(values, use)
        return Placeholders("".join(used))

    def encode_segments(
        self,
        pieces: Sequence[str],
        placeholders: Placeholders,
        continues: bool = False,
        max_length: int = sys.maxsize,
    ) -> list[int]:
        """Encode rendered text that `Placeholders.split` has split. `continues`: other text comes before it."""
        ids: list[int] = []
        for piece, next_piece in zip_longest(pieces, pieces[1:], fillvalue=""):
            check_length(ids, max_length)
            if piece in placeholders.ids:
                ids += placeholders.ids[piece]
                continue
            if next_piece in placeholders.answers and self._tokenizer.adds_dummy_prefix:
                piece = piece.removesuffix(" ")  # the answer's first token has that space in front
            ids += self._encode(piece, parse_special=True, continues=continues or bool(ids), max_length=max_length)
        return ids

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Tool], style: MessageStyle, values: Mapping[str, Any]
    ) -> str:
        shown_tools = [tool.to_dict() for tool in tools] or None
        style = replace(style, reasoning_key=self._reasoning_key)
        try:
            shown = [style.to_dict(message) for message in messages]
            return self._template.render(
                {"documents": None, **values, "messages": shown, "tools": shown_tools, **self._token_names}
            )
        except TokenizerError:
            raise
        except Exception as error:  # a template is a program: it can fail with any error
            raise _template_error(error, self.name) from error

    def _completed(self, messages: Sequence[Message]) -> list[Message]:
        """Return messages with roles that the template knows, and results with the names of their functions."""
        names = {call.id: call.name for message in messages for call in message.tool_calls}
        completed = []
        for message in messages:
            if message.role == "developer" and "developer" not in self.source:
                message = replace(message, role="system")
            if message.role == "tool" and message.name is None:
                message = replace(message, name=names.get(message.tool_call_id or ""))
            if message.role == "assistant" and self.reasoning_tags is not THINK:
                message = self._with_separate_reasoning(message)
            completed.append(message)
        return completed

    def _with_separate_reasoning(self, message: Message) -> Message:
        """Return a message without <think>, which this template doesn't know."""
        reasoning, content = split(message.content)
        reasoning = message.reasoning_content or reasoning
        if message.tool_calls and self._tool_support and not self._tool_support[1].has_text_before_results:
            reasoning, content = "\n\n".join(filter(None, (reasoning, content))), ""
        return replace(message, content=content, reasoning_content=reasoning or None)

    @cached_property
    def _tool_support(self) -> tuple[ToolFormat, MessageStyle] | None:
        render = partial(self._render, values={"add_generation_prompt": False})
        return derive_format(render, self._tokenizer.special_tokens.keys())

    @cached_property
    def _has_system_role(self) -> bool:
        conversation = [Message("system", "PROBE"), Message("user", "?")]
        try:
            return "PROBE" in self._render(conversation, (), MessageStyle(), {"add_generation_prompt": True})
        except TokenizerError:
            return False

    def _check_kwargs(self, values: Mapping[str, Any]) -> None:
        reserved = {"messages", "tools", "add_generation_prompt", "continue_final_message", *self._token_names}
        if taken := sorted(reserved & set(values)):
            raise TokenizerError(f"the variables of a chat template can't set {', '.join(taken)}", "other variables")

    def _encode(self, text: str, **options: Any) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False, **options)

    def _find_eos_token_ids(self) -> frozenset[int]:
        answer = Placeholders(self.source).take("", ())
        exchange = [Message("user", "?"), Message("assistant", answer)]
        behind = self.render(exchange, add_generation_prompt=False).partition(answer)[2]
        match = self.special.match(behind.lstrip())
        tokens = [*([match[0]] if match else []), *([CALL] if self.reasoning_tags is HARMONY else [])]
        return frozenset(id for token, id in self._tokenizer.special_tokens.items() if token in tokens)


class _GenerationBlock(jinja2.ext.Extension):
    """{% generation %}, which marks answers for training masks in transformers. Only its content is rendered."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=16)  # compiling takes up to 30 ms, and `mlxlm.generate` with messages needs it for every call
def _compile(source: str) -> jinja2.Template:
    """Compile a template in the sandbox of transformers: it can take time and memory, but not run code."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock]
    )
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)  # jinja's own escapes <, > and & for HTML
    return environment.from_string(source)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    if len(form) > _MAX_DATE_FORMAT or re.search(r"%[\W_]*\d", form):  # %99999Y is a width
        raise jinja2.TemplateError(f"strftime_now of {form[:_MAX_DATE_FORMAT]!r} has a long or padded format")
    return datetime.now().strftime(form)


_HINT = f"another template: {', '.join([*CHAT_FORMATS, PLAIN])}, or a jinja file"


def _describe(name: str) -> str:
    return "the model's chat template" if name == MODEL else f"the chat template {name}"


def _template_error(error: Exception, name: str) -> TokenizerError:
    where = f" at line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
    reason = " ".join(str(error).split()) or type(error).__name__
    return TokenizerError(f"{_describe(name)} failed{where}: {reason}", _HINT, is_operator_hint=True)


class Placeholders:
    """The placeholders of one conversation: characters for texts whose token ids are known, while it is rendered.

    Attributes:
        ids: Token ids by placeholder.
        answers: Placeholders of answers.
    """

    def __init__(self, text: str):
        """`text` is everything that is rendered; its characters can't be placeholders."""
        self._free = _unused_characters(text)
        self._texts: dict[str, str] = {}  # by placeholder
        self._by_text: dict[str, str] = {}
        self.ids: dict[str, Sequence[int]] = {}
        self.answers: set[str] = set()

    def take(self, text: str, ids: Sequence[int], answer: bool = False) -> str:
        """Return a placeholder for `text`: the same one for the same text, unless it is an answer."""
        if not answer and text in self._by_text:
            return self._by_text[text]
        character = next(self._free, None)
        if character is None:
            raise TokenizerError("this conversation has too many answers", "a new conversation")
        self._texts[character], self.ids[character] = text, ids
        if answer:
            self.answers.add(character)
        else:
            self._by_text[text] = character
        return character

    def restore(self, text: str) -> str:
        """Return `text` with every placeholder replaced by its text."""
        return "".join(self._texts.get(piece, piece) for piece in self.split(text))

    def split(self, text: str) -> Iterator[str]:
        """Yield the placeholders in `text` and the text between them, in order."""
        pieces = re.split(f"([{''.join(self.ids)}])", text) if self.ids else [text]
        return filter(None, pieces)


def _unused_characters(text: str) -> Iterator[str]:
    used = set(text)  # takes a moment for a long text, and most conversations need no placeholder
    yield from (c for c in map(chr, _PRIVATE_USE) if c not in used)
