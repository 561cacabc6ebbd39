"""What a text is to be like: how its tokens are drawn, what it must match, where it ends."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from mlxlm.cache.options import is_int_at_least
from mlxlm.utils.errors import GenerationError

MAX_LOGPROBS = 1000  # a token's likeliest alternatives
MAX_PENALTY_WINDOW = 1 << 14  # tokens that a penalty looks back on
MAX_SCHEMA_CHARS = 1 << 20  # characters of a schema or a regular expression, and of all choices together


@dataclass(frozen=True)
class SamplingOptions:
    """How a token is drawn. Raises GenerationError that names every setting that can't work. Numbers may be numpy's.

    The settings apply in this order, which is also that of the steps of `Sampler`:

    logit_bias: {token id: number added to its logit}; also as "id=number" strings.
    repetition_penalty: above 1 makes tokens of the last `repetition_context_size` less likely; 1 is off.
    presence_penalty, frequency_penalty: subtracted from the logit of every token generated so far, once and for
        each time it was.
    dry_multiplier: above 0, a token that would lengthen a repetition of the last `dry_penalty_last_n` tokens is made less
        likely by dry_multiplier * dry_base ** (length - dry_allowed_length), from that length on. A token whose text
        has one of `dry_sequence_breakers` in it ends a repetition; () or "" for none.
    json_schema, regex, choice: what the text must match as a whole (at most one of them): a JSON schema, as text or
        as a dict (or True, for any JSON); a regular expression, in which \\d is 0-9; one of these texts.
    temperature: 0 takes the likeliest token (greedy); 1 the model's own distribution.
    top_k: only the k likeliest tokens; 0 is off.
    typical_p: only the tokens of most typical surprise that hold this much probability together; 1 is off.
    top_p: only the likeliest tokens that hold this much probability together; 1 is off.
    min_p: only tokens at least this fraction as likely as the likeliest; 0 is off.
    xtc_probability: how often, of all tokens at least `xtc_threshold` likely, only the least likely stays.
    seed: equal seeds give equal texts; None draws one, which the result reports.
    logprobs: 0 reports the log-probability of every token drawn, n also the n likeliest tokens; None neither. They
        are those of the model, before all of the above.
    """

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0
    repetition_context_size: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 1024
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    json_schema: str | Mapping[str, Any] | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()
    logprobs: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for setting in fields(self):
            self._set(setting.name, _plain(getattr(self, setting.name)))
        for name in ("dry_sequence_breakers", "choice"):
            self._set(name, _texts(getattr(self, name)))
        if self.dry_sequence_breakers == ("",):
            self._set("dry_sequence_breakers", ())
        self._set("logit_bias", _biases(self.logit_bias))
        if isinstance(self.json_schema, Mapping | bool):
            self._set("json_schema", _json_text(self.json_schema))
        problems = list(self._problems())
        if problems:
            raise GenerationError("these settings can't work: " + "; ".join(problems))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def of(cls, beside: Sequence[str] = (), /, **settings: Any):
        """The options from keyword arguments. Raises GenerationError for a name that is none of them; `beside` are
        other names that the caller takes, for its hint."""
        names = [f.name for f in fields(cls)]
        unknown = sorted(set(settings) - set(names))
        if unknown:
            raise GenerationError(f"there is no setting {', '.join(unknown)}", "one of " + ", ".join([*beside, *names]))
        return cls(**settings)

    @property
    def constraint(self) -> str | None:
        """The name of the setting that the text must match as a whole, or None."""
        return next(iter(self._constraints()), None)

    def check_vocabulary(self, size: int) -> None:
        """Raises GenerationError for what a model of so many tokens doesn't have."""
        if beyond := [token for token in self.logit_bias if token >= size]:
            raise GenerationError(f"logit_bias names the token {beyond[0]}", f"ids from 0 to {size - 1}")
        if self.logprobs is not None and self.logprobs > size:
            raise GenerationError(f"logprobs is {self.logprobs}, and the model has {size} tokens", "fewer")

    def _constraints(self) -> list[str]:
        return [name for name in ("json_schema", "regex", "choice") if getattr(self, name) not in (None, ())]

    def _problems(self) -> Iterator[str]:
        # Below 0.001 the scaled logits leave float32, and the draw is greedy anyway.
        if self.temperature != 0 and not _within(self.temperature, 0.001, 100):
            yield f"temperature is {self.temperature!r} (0 for greedy, or 0.001 to 100)"
        if not is_int_at_least(self.top_k, 0):
            yield f"top_k is {self.top_k!r} (a positive whole number, or 0 for off)"
        if not _within(self.top_p, 0, 1) or self.top_p == 0:
            yield f"top_p is {self.top_p!r} (above 0 and at most 1, such as 0.9)"
        if not _within(self.min_p, 0, 1):
            yield f"min_p is {self.min_p!r} (0 to 1, such as 0.05)"
        if not _within(self.typical_p, 0, 1) or self.typical_p == 0:
            yield f"typical_p is {self.typical_p!r} (above 0 and at most 1, such as 0.9)"
        if not _within(self.xtc_probability, 0, 1):
            yield f"xtc_probability is {self.xtc_probability!r} (0 to 1, such as 0.5)"
        if not _within(self.xtc_threshold, 0, 1) or self.xtc_threshold == 0:
            yield f"xtc_threshold is {self.xtc_threshold!r} (above 0, such as 0.1; above 0.5 is off)"
        if self.temperature == 0:
            # Both can take the likeliest token away, and there would be no draw to choose another one by.
            if self.typical_p != 1:
                yield "typical_p needs a temperature above 0 (such as 0.7)"
            if self.xtc_probability != 0:
                yield "xtc_probability needs a temperature above 0 (such as 0.7)"
        yield from self._penalty_problems()
        yield from self._constraint_problems()
        if self.seed is not None and not (is_int_at_least(self.seed, 0) and self.seed < 2**64):
            yield f"seed is {self.seed!r} (a whole number from 0 to 2^64 - 1)"
        if self.logprobs is not None and not (is_int_at_least(self.logprobs, 0) and self.logprobs <= MAX_LOGPROBS):
            yield f"logprobs is {self.logprobs!r} (0 for the chosen token's, or up to {MAX_LOGPROBS} of the likeliest)"

    def _penalty_problems(self) -> Iterator[str]:
        if not _within(self.repetition_penalty, 0.01, 100):
            yield f"repetition_penalty is {self.repetition_penalty!r} (1 for off, or a bit more, such as 1.1)"
        for name in ("repetition_context_size", "dry_penalty_last_n", "dry_allowed_length"):
            value = getattr(self, name)
            if not is_int_at_least(value, 1) or value > MAX_PENALTY_WINDOW:
                yield f"{name} is {value!r} (a whole number from 1 to {MAX_PENALTY_WINDOW})"
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not _within(value, -100, 100):
                yield f"{name} is {value!r} (0 for off, or a bit more, such as 0.5)"
        if not _within(self.dry_multiplier, 0, 100):
            yield f"dry_multiplier is {self.dry_multiplier!r} (0 for off, or a bit more, such as 0.8)"
        if not _within(self.dry_base, 1, 100):
            yield f"dry_base is {self.dry_base!r} (1 to 100, such as 1.75)"
        yield from _text_problems("a dry_sequence_breakers entry", self.dry_sequence_breakers)
        if not isinstance(self.logit_bias, Mapping):
            yield f"logit_bias is {self.logit_bias!r} (ids and numbers, such as {{42: -100}})"
            return
        for token, bias in self.logit_bias.items():
            if not is_int_at_least(token, 0) or token >= 2**31:
                yield f"logit_bias has the token {token!r} (an id, such as 42)"
            elif isinstance(bias, tuple):
                yield f"logit_bias has the token {token} twice (one number for each)"
            elif not _within(bias, -10_000, 10_000):
                yield f"logit_bias of token {token} is {bias!r} (-10000 to 10000, such as -100)"

    def _constraint_problems(self) -> Iterator[str]:
        if len(given := self._constraints()) > 1:
            yield f"{' and '.join(given)} can't both hold (only one of them)"
        if self.json_schema is not None:
            yield from _schema_problems(self.json_schema)
        if self.regex is not None and not (isinstance(self.regex, str) and self.regex and _is_utf8(self.regex)):
            yield f"regex is {self.regex!r} (a regular expression, such as [0-9]+)"
        problems = list(_text_problems("a choice", self.choice))
        yield from problems
        if not problems and any(_size(text) > MAX_SCHEMA_CHARS for text in (self.regex or "", "".join(self.choice))):
            yield f"{given[0]} is too long (at most {MAX_SCHEMA_CHARS} characters)"


@dataclass(frozen=True)
class GenerationOptions(SamplingOptions):
    """SamplingOptions, and where a text ends.

    max_tokens: at most this many tokens; None for as many as the model's context has room for.
    stop: strings that end the text and are not part of it. Beside a constraint, whichever ends the text first does.
    """

    max_tokens: int | None = 256
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._set("stop", _texts(self.stop))
        super().__post_init__()

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        limit = self.max_tokens
        if limit is not None and not is_int_at_least(limit, 1):
            yield f"max_tokens is {limit!r} (a positive whole number, such as 256)"
        yield from _text_problems("a stop string", self.stop)


def _within(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _text_problems(what: str, texts: Sequence[Any]) -> Iterator[str]:
    if wrong := [text for text in texts if not isinstance(text, str)]:
        yield f"{what} is {wrong[0]!r} (a text)"
    elif "" in texts:
        yield f"{what} is empty (one character or more)"
    elif wrong := [text for text in texts if not _is_utf8(text)]:
        yield f"{what} is {wrong[0]!r} (characters that UTF-8 has)"


def _is_utf8(text: str) -> bool:
    """Bytes that a shell gives, and that are no UTF-8, are halves of surrogate pairs here."""
    return text.encode("utf-8", "ignore").decode() == text


def _size(text: Any) -> int:
    return len(text) if isinstance(text, str) else 0


def _texts(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str) or not isinstance(value, Sequence) else tuple(value)


def _plain(value: Any) -> Any:
    """Python's number for one of numpy's; anything else as it is."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _biases(given: Any) -> Any:
    """Ids and biases of a mapping (JSON has its ids as strings) or of "id=bias" texts; what is neither stays, to be
    named as a problem, as do two biases of one id."""
    if isinstance(given, Mapping):
        pairs = given.items()
    elif not isinstance(given, Sequence):
        return given
    else:
        pairs = [tuple(text.split("=", 1)) if isinstance(text, str) and "=" in text else (repr(text), None)
                 for text in _texts(given)]  # fmt: skip
    found: dict[Any, Any] = {}
    for token, bias in pairs:
        token, bias = _number(token, int), _number(bias, float)
        found[token] = (found[token], bias) if token in found else bias
    return found


def _number(value: Any, kind: type) -> Any:
    try:
        return kind(value) if isinstance(value, str) else _plain(value)
    except ValueError:
        return value


def _json_text(schema: Mapping[str, Any] | bool) -> Any:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return schema  # named as a problem


def _schema_problems(schema: Any) -> Iterator[str]:
    try:
        if not isinstance(schema, str):
            what = "it holds what JSON doesn't have" if isinstance(schema, Mapping) else f"it is {schema!r}"
            raise ValueError(what)
        if len(schema) > MAX_SCHEMA_CHARS:
            raise ValueError(f"it has more than {MAX_SCHEMA_CHARS} characters")
        # Python takes more for JSON than the library, whose errors point into another text than this one.
        found = json.loads(schema, parse_constant=_finite, parse_float=_finite, parse_int=_finite)
        if not isinstance(found, dict | bool):
            raise ValueError("it is no object")
        if not _is_utf8(json.dumps(found, ensure_ascii=False)):
            raise ValueError("it has half of a surrogate pair")
    except (ValueError, RecursionError) as error:
        yield f'json_schema is not a JSON schema: {error} (such as {{"type": "object"}})'


def _finite(number: str) -> float:
    if not math.isfinite(value := float(number)):
        raise ValueError(f"it has {number[:20]}, which is no number that can be had")
    return value
