"""Checks of the values of generation options."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mlxlm.config.numbers import is_int_at_least, is_number

MAX_LOGPROBS = 1000
MAX_PENALTY_WINDOW = 1 << 14  # tokens that a penalty looks back on
MAX_SCHEMA_CHARS = 1 << 18  # of a schema, a regular expression or grammar, and of all choices together
GRAMMAR_HINT = "a Lark grammar in llguidance's dialect, such as start: /[0-9]+/"


def _real(low: float, high: float, *, above: bool = False, also: float | None = None) -> Callable[[Any], bool]:
    """Check for a number from `low` (above it, if `above`) to `high`, or equal to `also`."""
    return lambda value: is_number(value) and (value == also or low <= value <= high and not (above and value == low))


def _integer(low: int, high: float = math.inf, *, none: bool = False) -> Callable[[Any], bool]:
    """Check for an integer from `low` to `high`, or None if `none`."""
    return lambda value: (none and value is None) or (is_int_at_least(value, low) and value <= high)


_WINDOW = _integer(1, MAX_PENALTY_WINDOW), f"a whole number from 1 to {MAX_PENALTY_WINDOW}"
_PENALTY = _real(-100, 100), "0 for off, or a bit more, such as 0.5"

# Per option: whether a value is valid, and what would be.
CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    # Below 0.001 the scaled logits exceed float32, and sampling is greedy anyway.
    "temperature": (_real(0.001, 100, also=0), "0 for greedy, or 0.001 to 100"),
    "top_k": (_integer(0), "a positive whole number, or 0 for off"),
    "top_p": (_real(0, 1, above=True), "above 0 and at most 1, such as 0.9"),
    "min_p": (_real(0, 1), "0 to 1, such as 0.05"),
    "typical_p": (_real(0, 1, above=True), "above 0 and at most 1, such as 0.9"),
    "xtc_probability": (_real(0, 1), "0 to 1, such as 0.5"),
    "xtc_threshold": (_real(0, 1, above=True), "above 0, such as 0.1; above 0.5 is off"),
    "repetition_penalty": (_real(0.01, 100), "1 for off, or a bit more, such as 1.1"),
    "repetition_context_size": _WINDOW,
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "dry_multiplier": (_real(0, 100), "0 for off, or a bit more, such as 0.8"),
    "dry_base": (_real(1, 100), "1 to 100, such as 1.75"),
    "dry_allowed_length": _WINDOW,
    "dry_penalty_last_n": _WINDOW,
    "seed": (_integer(0, 2**64 - 1, none=True), "a whole number from 0 to 2^64 - 1"),
    "deterministic": (lambda value: value is None or isinstance(value, bool), "true or false"),
    "logprobs": (
        _integer(0, MAX_LOGPROBS, none=True),
        f"0 for the chosen token's, or up to {MAX_LOGPROBS} of the most likely",
    ),
    "max_tokens": (_integer(1, none=True), "a positive whole number, such as 256"),
}


def string_problems(what: str, texts: Sequence[Any]) -> Iterator[str]:
    """Problems of an option that is a list of strings."""
    if invalid := [text for text in texts if not isinstance(text, str)]:
        yield f"{what} is {invalid[0]!r} (a string)"
    elif "" in texts:
        yield f"{what} is empty (one character or more)"
    elif invalid := [text for text in texts if not is_utf8(text)]:
        yield f"{what} is {invalid[0]!r} (characters that UTF-8 can encode)"


def is_utf8(text: str) -> bool:
    """False for the lone surrogates that a shell makes of bytes that aren't UTF-8."""
    return text.encode("utf-8", "ignore").decode() == text


def logit_bias_problems(logit_bias: Any) -> Iterator[str]:
    """Problems of the entries of `logit_bias`."""
    if not isinstance(logit_bias, Mapping):
        yield f"logit_bias is {logit_bias!r} (ids and numbers, such as {{42: -100}})"
        return
    for token, bias in logit_bias.items():
        if not is_int_at_least(token, 0) or token >= 2**31:
            yield f"logit_bias has the token {token!r} (an id, such as 42)"
        elif isinstance(bias, tuple):
            yield f"logit_bias has the token {token} twice (one number for each)"
        elif not _real(-10_000, 10_000)(bias):
            yield f"logit_bias of token {token} is {bias!r} (-10000 to 10000, such as -100)"


def schema_problems(schema: Any) -> Iterator[str]:
    """Problems of a JSON schema that can be found without compiling it."""
    try:
        if not isinstance(schema, str):
            not_json = isinstance(schema, Mapping)
            raise ValueError("it has values that JSON can't represent" if not_json else f"it is {schema!r}")
        if len(schema) > MAX_SCHEMA_CHARS:
            raise ValueError(f"it has more than {MAX_SCHEMA_CHARS} characters")
        # llguidance accepts less than Python, and its errors point into a text other than this one.
        value = json.loads(schema, parse_constant=_finite, parse_float=_finite, parse_int=_finite)
        if not isinstance(value, dict | bool):
            raise ValueError("it is not an object")
        if not is_utf8(json.dumps(value, ensure_ascii=False)):
            raise ValueError("it has half of a surrogate pair")
    except (ValueError, RecursionError) as error:
        yield f'json_schema is not a JSON schema: {error} (such as {{"type": "object"}})'


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"it has {number[:20]}, which is not a finite number")
    return value
