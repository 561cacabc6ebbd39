"""Constrained decoding with llguidance: a JSON schema, a regular expression, one of several choices, or a grammar.

A grammar is compiled once per tokenizer. Each text has a matcher, which after every token computes a bitmask of the
tokens that can follow. The bitmask is unpacked on the device.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.generation.json_schema import explain_schema_error, to_llguidance_schema
from mlxlm.generation.options import GRAMMAR_HINT, GenerationOptions
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import GenerationError
from mlxlm.utils.json_files import parse_json

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_HINTS = {
    "json_schema": "a schema without it",
    "regex": r"a regular expression such as [0-9]+, with \ before special characters, as in \(",
    "choice": "fewer or shorter texts",
    "grammar": GRAMMAR_HINT,
}
_UNSUPPORTED = "a regular expression without it; it matches the whole text, so that ^ and $ aren't needed"


class Grammar:
    """A constraint, compiled for the tokens of a model. Texts share it.

    Attributes:
        name: The option that was compiled: json_schema, regex, choice or grammar.
    """

    def __init__(self, initial: LLMatcher, name: str, llg_tokenizer: LLTokenizer, dummy_prefix: bool):
        """Wrap a matcher in its initial state.

        Args:
            initial: The matcher.
            name: The option.
            llg_tokenizer: llguidance's tokenizer.
            dummy_prefix: Whether the tokens have to begin with a space that isn't part of the text.
        """
        self._initial, self._llg_tokenizer, self._dummy_prefix = initial, llg_tokenizer, dummy_prefix
        self.name = name

    @classmethod
    def compile(
        cls, options: GenerationOptions, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> Grammar | None:
        """Compile `options.constraint`; None without one. Cached.

        Args:
            options: The options with the constraint.
            tokenizer: The tokenizer.
            vocab_size: The width of the logits. Ids without a token are never allowed.
            eos_token_ids: Tokens that end a text. Each is allowed exactly where the text may end, whatever text it
                stands for elsewhere. Without any, a text ends where nothing can follow.

        Raises:
            GenerationError: For an unsupported keyword, a mistake in a regular expression, a constraint that nothing
                matches or that is too large, and a tokenizer whose tokens aren't bytes.
        """
        name = options.constraint
        if name is None:
            return None
        if not tokenizer.has_byte_tokens:
            reason = "the text of this tokenizer's tokens depends on their neighbors"
            raise GenerationError(f"{name} isn't supported with this model: {reason}", f"the same without {name}")
        return _compile(name, getattr(options, name), tokenizer, vocab_size, frozenset(eos_token_ids))

    def matcher(self) -> Matcher:
        """A matcher for one text, at its beginning."""
        return Matcher(self, self._initial.deep_copy())

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        return self._llg_tokenizer.decode_bytes(list(ids)).decode("utf-8", "replace")

    def matches_text(self, text: str) -> bool:
        """Whether the whole text fulfills the constraint."""
        matcher = self._initial.deep_copy()
        ids = self._llg_tokenizer.tokenize_str(" " * self._dummy_prefix + text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


class Matcher:
    """The state of a constraint in one text."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher, consumed: Sequence[int] = ()):
        """A state of `matcher`, after the tokens `consumed`."""
        self._grammar, self._name = grammar, grammar.name
        self._matcher = matcher
        self._consumed = list(consumed)
        self._bitmask: np.ndarray | None = None  # cached until the next token

    def copy(self) -> Matcher:
        """A matcher in the same state, that advances on its own."""
        return Matcher(self._grammar, self._matcher.deep_copy(), self._consumed)

    @property
    def finished(self) -> bool:
        """Whether the text fulfills the constraint and only an end token can follow."""
        return self.error is None and self._matcher.is_stopped()

    @property
    def error(self) -> str | None:
        """Why no token can follow; None if one can."""
        if not self._matcher.is_error():
            self.token_bitmask()
        if self._matcher.is_error():
            return f"{self._name}: {_reason(self._matcher.get_error())}"
        if self._matcher.is_stopped() and not self._matcher.is_accepting() or not self.token_bitmask().any():
            return f"{self._name}: no token of this model can follow"
        return None

    @property
    def constraint_error(self) -> str | None:
        """Why the text, if it ends here, doesn't fulfill the constraint; None if it does."""
        if not self._matcher.is_error() and self._matcher.is_accepting():
            problem = _json_problem(self._grammar.decode(self._consumed)) if self._name == "json_schema" else None
            return problem and f"{self._name}: {problem}"
        return self.error or f"the text ended before it matched {self._name}"

    def constraint_error_of(self, text: str) -> str | None:
        """`constraint_error` of a text that a stop string has cut short."""
        if self._grammar.matches_text(text):
            return None
        return f"a stop string ended the text before it matched {self._name}"

    def consume(self, token: int) -> None:
        """Advance by a token."""
        self._bitmask = None
        self._consumed.append(token)
        self._matcher.consume_token(token)

    def token_bitmask(self) -> np.ndarray:
        """The tokens that can follow: bit `id % 32` of word `id // 32`, uint32 `[ceil(V / 32)]` or one word more."""
        if self._bitmask is None:
            self._bitmask = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        return self._bitmask

    def draft_token_bitmasks(self, draft: Sequence[int]) -> list[np.ndarray]:
        """`token_bitmask` now and after each token of `draft`; after one that isn't allowed, the last valid bitmask."""
        masks = [self.token_bitmask()]
        if not draft:
            return masks
        ahead = self._matcher.deep_copy()
        for token in draft[: ahead.validate_tokens(list(draft))]:
            ahead.consume_token(token)
            masks.append(np.frombuffer(ahead.compute_bitmask(), np.uint32))
        return masks + masks[-1:] * (len(draft) + 1 - len(masks))


def without_tokens(bitmask: np.ndarray, ids: Iterable[int]) -> np.ndarray:
    """A bitmask without the tokens `ids`; the bitmask itself if it has no others."""
    words = bitmask.copy()
    for id in ids:
        if id // 32 < len(words):
            words[id // 32] &= ~np.uint32(1 << id % 32)
    return words if words.any() else bitmask


def stack_token_bitmasks(token_bitmasks: Sequence[np.ndarray], vocab_size: int) -> mx.array:
    """Bitmasks as `apply_token_bitmask` takes them."""
    words = np.zeros((len(token_bitmasks), -(-vocab_size // 32)), np.uint32)
    for row, bitmask in zip(words, token_bitmasks, strict=True):
        row[: len(bitmask)] = bitmask[: len(row)]
    return mx.array(words)


def apply_token_bitmask(logits: mx.array, words: mx.array) -> mx.array:
    """Set the logits `[R, V]` of tokens without a bit in words `[R, ceil(V / 32)]`, uint32, to -inf."""
    bits = (words[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
    return mx.where(bits.reshape(len(words), -1)[:, : logits.shape[-1]] != 0, logits, -mx.inf)


@lru_cache(maxsize=8)  # the rows of one request share a grammar
def _compile(name: str, value: Any, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> Grammar:
    import llguidance

    with _library_errors(name):
        llg_tokenizer = llguidance_tokenizer(tokenizer, vocab_size, eos_token_ids)
        dummy_prefix = tokenizer.strips_dummy_prefix
        grammar = _llguidance_grammar(name, value, dummy_prefix)
        # llguidance's own limits bound time and memory; its verbose errors show the state of the parser.
        limits = llguidance.LLParserLimits(verbose_errors=False)
        initial = llguidance.LLMatcher(llg_tokenizer, grammar, log_level=0, limits=limits)
        if not initial.is_error():
            initial.compute_bitmask()  # some errors only occur here, since parts are built lazily
    problem = initial.get_error()
    if problem.startswith("NoExtension") or not problem and initial.is_stopped() and not initial.is_accepting():
        raise GenerationError(f"{name}: no text matches it", "a constraint that some text matches")
    if problem:
        raise _generation_error(name, problem)
    return Grammar(initial, name, llg_tokenizer, dummy_prefix)


def check_llguidance_schema(schema: dict[str, Any]) -> None:
    """Raise GenerationError if a schema from `to_llguidance_schema` can't be compiled."""
    from llguidance import LLMatcher

    with _library_errors("json_schema"):
        problem = LLMatcher.validate_grammar(json.dumps({"grammars": [{"json_schema": schema}]}))
    if problem:
        raise _generation_error("json_schema", problem)


def _llguidance_grammar(name: str, value: Any, dummy_prefix: bool) -> str:
    """The grammar for llguidance, as JSON, of the option `name`.

    With `dummy_prefix`, the tokenizer strips one space from the front of a text. The tokens then have to begin with
    one, like those of a text that it encodes.
    """
    from llguidance import regex_to_lark

    body: dict[str, Any]
    if name == "json_schema":
        body = {"json_schema": to_llguidance_schema(json.loads(value))}
    elif name == "grammar":
        body = {"lark_grammar": value}
    elif name == "regex":
        body = {"lark_grammar": f"start: /{regex_to_lark(value, 'd')}/"}
    else:
        # One regular expression, which has no limit of alternatives; characters by their code points.
        texts = ("".join(f"\\x{{{ord(character):X}}}" for character in text) for text in value)
        body = {"lark_grammar": f"start: /{'|'.join(texts)}/"}
    grammars = [{"name": "text", **body}]
    if dummy_prefix:
        # Only a grammar can begin with a special token, before which decoding strips nothing.
        space = '" "?' if name == "grammar" else '" "'
        grammars.insert(0, {"name": "spaced", "lark_grammar": f"start: {space} @text"})
    return json.dumps({"grammars": grammars})


def _json_problem(text: str) -> str | None:
    """A problem that llguidance doesn't prevent, such as a repeated key; None if there is none."""
    try:
        parse_json(text.encode(), "it", GenerationError, strict=True)
    except GenerationError as error:
        return error.message
    return None


def _generation_error(name: str, message: str) -> GenerationError:
    """An error of llguidance in terms of the constraint."""
    schema_error = message.rpartition("failed to compile JSON schema: ")[2]  # a grammar can contain schemas
    explanation = explain_schema_error(schema_error) if name in ("json_schema", "grammar") else None
    reason, hint = explanation or (_reason(message), _HINTS[name])
    if name == "regex" and re.search("look-?around|backreference", message):
        hint = _UNSUPPORTED
    return GenerationError(f"{name}: {reason}", hint)


def _reason(message: str) -> str:
    """The line of an error that says what is wrong; for regular expressions it follows an excerpt."""
    if message.startswith("NoExtension"):
        return "no token of this model can follow"
    if "lookarounds not supported" in message:
        return r"^, $ and \b can't be inside it"
    match = re.search(r"^error: (.*)$", message, re.MULTILINE)
    line = match[1] if match else message.split("\n", 1)[0] or "unknown error"
    return re.sub(r"^(?:at )?(\d+)\((\d+)\): ", r"at line \1, column \2: ", line)


@contextmanager
def _library_errors(name: str) -> Iterator[None]:
    """Convert errors of llguidance: ValueError, or a panic, which is a BaseException of its own type."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
            raise
        raise _generation_error(name, str(error)) from error


@lru_cache(maxsize=4)  # making one takes 0.2 s for 32,000 tokens
def llguidance_tokenizer(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> LLTokenizer:
    """The tokenizer for llguidance. See `Grammar.compile`."""
    import llguidance

    eos_ids = sorted(id for id in eos_token_ids if id < vocab_size)
    tokens = [tokenizer.token_bytes(id, skip_special_tokens=False) for id in range(vocab_size)]
    # The byte 0xFF, which no UTF-8 has, marks special tokens in llguidance: a token of it would match their first byte.
    tokens = [b"" if b"\xff" in token else token for token in tokens]
    for id in eos_ids:
        tokens[id] = b""
    if not eos_ids:  # llguidance needs one: an id beyond the logits
        eos_ids = [vocab_size]
        tokens.append(b"")
    # An end token isn't special in llguidance: of two, it would allow the second where any special token may follow.
    special_ids = {id for id in tokenizer.special_tokens.values() if id < vocab_size and id not in eos_ids}
    wrapper: Any = _TokenizerWrapper(tokenizer, tokens, eos_ids, special_ids)
    return llguidance.LLTokenizer(wrapper, eos_token=eos_ids)


class _TokenizerWrapper:
    """The interface that llguidance expects of a tokenizer.

    Special tokens match no text; a grammar allows them by their names (if they are in angle brackets) or ids.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], eos_ids: list[int], special_ids: set[int]):
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, sorted(special_ids), eos_ids[0]
        self._tokenizer = tokenizer
        self._ids = {text: id for id, text in reversed(list(enumerate(tokens))) if text and id not in special_ids}
        self._max_length = max(map(len, tokens), default=0)

    def __call__(self, text: str) -> list[int]:
        """Encode text that must follow: with the tokenizer, unless that normalizes it, else greedily."""
        ids, content = self._tokenizer.encode(text, continues=True), text.encode("utf-8")
        if b"".join(self.tokens[id] for id in ids) == content:
            return ids
        ids, start = [], 0
        while start < len(content):
            ends = range(min(len(content), start + self._max_length), start, -1)
            end = next((end for end in ends if content[start:end] in self._ids), None)
            if end is None:  # no token has this byte: llguidance finds that nothing can follow
                break
            ids.append(self._ids[content[start:end]])
            start = end
        return ids
