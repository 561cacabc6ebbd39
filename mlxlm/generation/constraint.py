"""Texts that match a JSON schema, a regular expression or one of some choices, through llguidance.

A grammar is compiled once for a tokenizer; each text has a matcher, which says after every token which tokens can
follow. What the matcher allows is a bit per token, packed, and is unpacked on the device.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.generation.json_schema import explain_schema_error, to_llguidance_schema
from mlxlm.generation.options import SamplingOptions
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import GenerationError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_COMPILED = 8  # grammars that are kept of a tokenizer: the rows of one request, and of a few more
_HINTS = {
    "json_schema": "a schema without it",
    "regex": r"one such as [0-9]+, with \ before a character that stands for itself, as in \(",
    "choice": "fewer or shorter texts",
}
_UNSUPPORTED = "a regular expression without it; it is matched as a whole, so that ^ and $ aren't needed"


class Grammar:
    """What a text must match, compiled for the tokens of a model. Texts share it."""

    def __init__(self, start: LLMatcher, name: str, tokens: LLTokenizer, first_space: bool):
        """`first_space`: the tokens have to begin with a space, which isn't part of the text."""
        self._start, self._tokens, self._first_space = start, tokens, first_space
        self.name = name

    @classmethod
    def compile(
        cls, options: SamplingOptions, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> Grammar:
        """The grammar of `options.constraint`, which must be set.

        `vocab_size` is that of the logits: ids without a token are never allowed. `eos_token_ids` end a text; each is allowed
        exactly where the text may end, whatever text it stands for elsewhere. Without any, a text ends where
        nothing can follow.

        Raises GenerationError that says why a constraint can't be had: a keyword that isn't supported, a mistake in a
        regular expression, one that nothing matches or that is too large, a tokenizer whose tokens aren't bytes.
        """
        name = options.constraint
        if not tokenizer.has_byte_tokens:
            reason = "the text of this tokenizer's tokens depends on their neighbours"
            raise GenerationError(f"{name} can't be had with this model: {reason}", f"the same without {name}")
        compiled = _compiled.setdefault(tokenizer, {})
        key = vocab_size, frozenset(eos_token_ids), options.json_schema, options.regex, options.choice
        if key not in compiled:
            if len(compiled) == _COMPILED:
                del compiled[next(iter(compiled))]
            compiled[key] = cls._compile(options, name, tokenizer, vocab_size, eos_token_ids)
        return compiled[key]

    @classmethod
    def _compile(
        cls, options: SamplingOptions, name: str, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> Grammar:
        import llguidance

        with _library_errors(name):
            tokens = _tokens(tokenizer, vocab_size, eos_token_ids)
            first_space = tokenizer.strips_dummy_prefix
            grammar = _grammar(options, first_space)
            # The library's own limits bound time and memory; an error need not show the state of its parser.
            limits = llguidance.LLParserLimits(verbose_errors=False)
            start = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits)
            if not start.is_error():
                start.compute_bitmask()  # builds what is built lazily: here is the time to fail
        problem = start.get_error()
        if problem.startswith("NoExtension") or not problem and start.is_stopped() and not start.is_accepting():
            raise GenerationError(f"{name}: no text matches it", "a constraint that some text matches")
        if problem:
            raise _error(name, problem)
        return cls(start, name, tokens, first_space)

    def matcher(self) -> Matcher:
        """For one text, at its beginning."""
        return Matcher(self, self._start.deep_copy())

    def text(self, ids: Sequence[int]) -> str:
        """What these tokens say."""
        return self._tokens.decode_bytes(list(ids)).decode("utf-8", "replace")

    def matches_text(self, text: str) -> bool:
        """Whether a text is all that the constraint asks for."""
        matcher = self._start.deep_copy()
        spelt = self._tokens.tokenize_str(" " * self._first_space + text)
        return matcher.try_consume_tokens(spelt) == len(spelt) and matcher.is_accepting()


class Matcher:
    """Follows one text, token by token."""

    def __init__(self, grammar: Grammar, matcher: LLMatcher, consumed: Sequence[int] = ()):
        self._grammar, self._name = grammar, grammar.name
        self._matcher = matcher
        self._consumed = list(consumed)
        self._allowed: np.ndarray | None = None

    def copy(self) -> Matcher:
        """A matcher at the same place, with its own future."""
        return Matcher(self._grammar, self._matcher.deep_copy(), self._consumed)

    @property
    def finished(self) -> bool:
        """Whether the text matches and nothing but an end token can follow."""
        return self.error is None and self._matcher.is_stopped()

    @property
    def error(self) -> str | None:
        """Why the text can't go on, or None."""
        if not self._matcher.is_error():
            self.token_bitmask()
        if self._matcher.is_error():
            return f"{self._name}: {_reason(self._matcher.get_error())}"
        if self._matcher.is_stopped() and not self._matcher.is_accepting() or not self.token_bitmask().any():
            return f"{self._name}: no token of this model can follow"
        return None

    @property
    def constraint_error(self) -> str | None:
        """Why the text, if it ends here, doesn't match; None if it does."""
        if not self._matcher.is_error() and self._matcher.is_accepting():
            problem = _json_problem(self._grammar.text(self._consumed)) if self._name == "json_schema" else None
            return problem and f"{self._name}: {problem}"
        return self.error or f"the text ended before it was what {self._name} asks for"

    def constraint_error_of(self, text: str) -> str | None:
        """`constraint_error`, of a text that a stop string has cut short."""
        if self._grammar.matches_text(text):
            return None
        return f"a stop string ended the text before it was what {self._name} asks for"

    def consume(self, token: int) -> None:
        """Go on by a token."""
        self._allowed = None
        self._consumed.append(token)
        self._matcher.consume_token(token)

    def token_bitmask(self) -> np.ndarray:
        """The tokens that can follow: bit `id % 32` of word `id // 32`, uint32 `[ceil(V / 32)]` or one word more."""
        if self._allowed is None:
            self._allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        return self._allowed

    def draft_token_bitmasks(self, draft: Sequence[int]) -> list[np.ndarray]:
        """`token_bitmask` here and after each token of `draft`; after one that isn't allowed, whatever it was before it."""
        ahead = self._matcher.deep_copy()
        masks = [self.token_bitmask()]
        for token in draft[: ahead.validate_tokens(list(draft))]:
            ahead.consume_token(token)
            masks.append(np.frombuffer(ahead.compute_bitmask(), np.uint32))
        return masks + masks[-1:] * (len(draft) + 1 - len(masks))


def apply_token_bitmask(logits: mx.array, token_bitmask: Sequence[np.ndarray]) -> mx.array:
    """The logits `[R, V]` of the tokens that `token_bitmask`, one a row, has a bit for; -inf for the others."""
    words = np.zeros((len(token_bitmask), -(-logits.shape[-1] // 32)), np.uint32)
    for row, given in zip(words, token_bitmask, strict=True):
        row[: len(given)] = given[: len(row)]
    bits = (mx.array(words)[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
    return mx.where(bits.reshape(len(token_bitmask), -1)[:, : logits.shape[-1]] != 0, logits, -mx.inf)


def _grammar(options: SamplingOptions, first_space: bool) -> str:
    """llguidance's grammar. `first_space`: the tokenizer takes one space off the front of a text, so that the tokens
    have to begin with one, as those of a text that it encodes do."""
    from llguidance import regex_to_lark

    if options.json_schema is not None:
        body = {"json_schema": to_llguidance_schema(json.loads(options.json_schema))}
    elif options.regex is not None:
        body = {"lark_grammar": f"start: /{regex_to_lark(options.regex, 'd')}/"}
    else:
        # One regular expression, which has no limit of alternatives; every character by its number.
        texts = ("".join(f"\\x{{{ord(character):X}}}" for character in text) for text in options.choice)
        body = {"lark_grammar": f"start: /{'|'.join(texts)}/"}
    grammars = [{"name": "text", **body}]
    if first_space:
        grammars.insert(0, {"name": "spaced", "lark_grammar": 'start: " " @text'})
    return json.dumps({"grammars": grammars})


class _Tokens:
    """What llguidance asks of a tokenizer."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], ends: list[int]):
        self.tokens, self.special_token_ids, self.eos_token_id = tokens, ends, ends[0]
        self._tokenizer = weakref.ref(tokenizer)  # the library keeps this for as long as the tokenizer lives
        self._ids = {text: id for id, text in reversed(list(enumerate(tokens))) if text}
        self._longest = max(map(len, tokens), default=0)

    def __call__(self, text: str) -> list[int]:
        """How a text that must follow is spelt: as the tokenizer does, where that is the same text (some normalize),
        else with the longest tokens."""
        ids, wanted = self._tokenizer().encode(text, continues=True), text.encode("utf-8")
        if b"".join(self.tokens[id] for id in ids) == wanted:
            return ids
        ids, place = [], 0
        while place < len(wanted):
            ends = range(min(len(wanted), place + self._longest), place, -1)
            found = next((end for end in ends if wanted[place:end] in self._ids), None)
            if found is None:  # no token has this byte: the library finds out that nothing can follow
                break
            ids.append(self._ids[wanted[place:found]])
            place = found
        return ids


_compiled: weakref.WeakKeyDictionary[Tokenizer, dict[Hashable, Grammar]] = weakref.WeakKeyDictionary()
_made: weakref.WeakKeyDictionary[Tokenizer, dict[tuple[int, frozenset[int]], LLTokenizer]]
_made = weakref.WeakKeyDictionary()


def _tokens(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: frozenset[int]) -> LLTokenizer:
    """Made once for a vocabulary: a fifth of a second for 32,000 tokens."""
    import llguidance

    made = _made.setdefault(tokenizer, {})
    key = vocab_size, frozenset(eos_token_ids)
    if key not in made:
        ends = sorted(id for id in eos_token_ids if id < vocab_size)
        tokens = [tokenizer.token_bytes(id) for id in range(vocab_size)]
        for id in ends:
            tokens[id] = b""
        if not ends:  # one that the logits don't have: the library needs one
            ends = [vocab_size]
            tokens.append(b"")
        made[key] = llguidance.LLTokenizer(_Tokens(tokenizer, tokens, ends), eos_token=ends)
    return made[key]


def _json_problem(text: str) -> str | None:
    """What the library doesn't watch, as keys that a schema doesn't name can be said twice, and readers take one of
    them; None for a text that is fine."""

    def unique(pairs: list[tuple[str, object]]) -> None:
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {json.dumps(key[:40])} is there twice")
            seen.add(key)

    try:
        json.loads(text, object_pairs_hook=unique, parse_int=str, parse_float=str)
    except RecursionError:
        return "its parts are nested too deeply to be read"
    except ValueError as error:
        return str(error)
    return None


def _error(name: str, message: str) -> GenerationError:
    """The library's error in the words of who wrote the constraint."""
    known = explain_schema_error(message) if name == "json_schema" else None
    reason, hint = known or (_reason(message), _HINTS[name])
    if name == "regex" and re.search("look-?around|backreference", message):
        hint = _UNSUPPORTED
    return GenerationError(f"{name}: {reason}", hint)


def _reason(message: str) -> str:
    """The line of an error that says what is wrong: regular expressions have it after a picture of the place."""
    if message.startswith("NoExtension"):
        return "no token of this model can follow"
    if "lookarounds not supported" in message:
        return r"^, $ and \b can't be inside it"
    found = re.search(r"^error: (.*)$", message, re.MULTILINE)
    return found[1] if found else message.split("\n", 1)[0] or "it can't be followed"


@contextmanager
def _library_errors(name: str) -> Iterator[None]:
    """The library raises ValueError, or panics, which Python sees as a BaseException of a type of its own."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
            raise
        raise _error(name, str(error)) from error
