"""Generation options: how tokens are sampled, and where a text ends."""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from typing import Any, Self

from mlxlm.config.numbers import is_int_at_least, is_number
from mlxlm.config.option import is_utf8, option, options_of, range_problems, types_of, valid_text
from mlxlm.generation.logit_filters import FILTERS, FilterArguments, FilterOptions
from mlxlm.utils.errors import GenerationError

MAX_SCHEMA_CHARS = 1 << 18  # of a schema, a regular expression or grammar, and of all choices together
GRAMMAR_HINT = "a Lark grammar in llguidance's dialect, such as start: /[0-9]+/"
_GBNF_RULE = re.compile(r"^[\w-]+\s*::=", re.MULTILINE)
_CONSTRAINTS = ("json_schema", "regex", "choice", "grammar")

_repetition = partial(option, section="Repetition penalties")
_penalty = partial(_repetition, low=-100, high=100)
_window = partial(_repetition, low=1, high=1 << 14)
_per_request = partial(option, per_request=True)
_constrained = partial(_per_request, section="Constrained output")
_stopping = partial(_per_request, section="Stopping", common=True)


@dataclass(frozen=True)
class PenaltyOptions:
    """Penalties for tokens that repeat earlier ones. They apply before the filters, in this order."""

    repetition_penalty: float = _repetition(
        1.0,
        "Divide or multiply the logits of recent tokens by this; 1 disables it.",
        low=0.01,
        high=100,
        generation_config=True,
    )
    repetition_context_size: int = _window(64, "How many recent tokens the repetition penalty applies to.")
    presence_penalty: float = _penalty(0.0, "Penalize tokens that were already generated; 0 disables it.")
    frequency_penalty: float = _penalty(0.0, "Penalize tokens by how often they were already generated; 0 disables it.")
    dry_multiplier: float = _repetition(
        0.0, "DRY: strength of the penalty on repeated phrases; 0 disables it.", low=0, high=100
    )
    dry_base: float = _repetition(
        1.75, "DRY: factor by which the penalty grows with each token of the phrase.", low=1, high=100
    )
    dry_allowed_length: int = _window(2, "DRY: penalize phrases from this many tokens on.")
    dry_penalty_last_n: int = _window(1024, "DRY: how many recent tokens to search for phrases.")
    dry_sequence_breakers: tuple[str, ...] = _repetition(
        ("\n", ":", '"', "*"),
        'DRY: text that ends a phrase; "" for none.',
        names="--dry-sequence-breaker",
        metavar="TEXT",
        default_text="newline, colon, double quote, *",
        max_items=64,  # each is looked for in all tokens of the vocabulary
    )


class PenaltyArguments(FilterArguments, total=False):
    """The fields of `PenaltyOptions`, as keyword arguments, after those of `FilterOptions`."""

    repetition_penalty: float
    repetition_context_size: int
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: str | Sequence[str]


@dataclass(frozen=True)
class GenerationOptions(PenaltyOptions, FilterOptions):
    r"""How tokens are sampled, and where a text ends. NumPy numbers are accepted.

    A token's logits pass through `logit_bias`, the penalties, the constraint, the temperature and the filters.

    Attributes:
        logit_bias: {token id: number added to its logit}; also as "id=number" strings.
        json_schema: JSON schema that the text must match, as text, dict or pydantic class; True for any JSON. At most
            one of `json_schema`, `regex`, `choice` and `grammar` can be set.
        regex: Regular expression that the whole text must match; \d is 0-9.
        choice: Strings of which the text must be one.
        grammar: Lark grammar that the text must match, in llguidance's dialect. Special tokens that it allows are part
            of the text.
        logprobs: 0 reports the log-probability of every sampled token, n also the n most likely tokens; None neither.
            They are those of the model, before all of the above.
        seed: Equal seeds give equal texts. None draws one, which the result reports.
        deterministic: The text depends on nothing but its request. On a CPU every text does. On a GPU, where rounding
            depends on what is computed together, such a text is read and decoded by itself, without the prefix cache
            and speculative decoding. None: if the request has a seed of its own, not a drawn or derived one.
        max_tokens: The maximum number of tokens; None for as many as the model's context has room for.
        min_tokens: None of the first `min_tokens` tokens ends the text: end tokens can't be drawn, and stop strings are
            part of it. A constraint that allows nothing but an end token still ends it.
        stop: Strings that end the text and aren't part of it. With a constraint, whichever ends the text first does.

    Raises:
        GenerationError: Naming every option that is invalid.
    """

    logit_bias: Mapping[int, float] = option(
        default_factory=dict,
        help="Add BIAS to the logit of the token ID.",
        section="Sampling",
        metavar="ID=BIAS",
        valid="ids and numbers from -10000 to 10000, such as {42: -100}",
    )
    json_schema: str | Mapping[str, Any] | bool | None = _constrained(
        None,
        "Generate JSON that conforms to this schema.",
        common=True,
        metavar="FILE|JSON",
        valid='a JSON schema, such as {"type": "object"}',
    )
    regex: str | None = _constrained(
        None,
        "Generate text that matches this regular expression as a whole.",
        metavar="REGEX",
        valid="a regular expression, such as [0-9]+",
    )
    choice: tuple[str, ...] = _constrained((), "Generate one of these texts.", metavar="TEXT")
    grammar: str | None = _constrained(
        None,
        "Generate text that matches this Lark grammar, in llguidance's dialect.",
        metavar="FILE|LARK",
        valid=GRAMMAR_HINT,
    )
    logprobs: int | None = _per_request(
        None,
        "Report the log-probability of each token, and of the N most likely tokens.",
        section="Output",
        low=0,
        high=1000,
        metavar="N",
    )
    seed: int | None = _per_request(
        None,
        "Random seed. The same seed gives the same text.",
        section="Sampling",
        low=0,
        high=2**64 - 1,
        valid="a whole number from 0 to 2^64 - 1",
        default_text="random",
        common=True,
    )
    deterministic: bool | None = option(
        None,
        "On a GPU, read and decode the text by itself, so that its rounding doesn't depend on other texts.",
        section="Sampling",
        default_text="if a seed is given",
    )
    max_tokens: int | None = _stopping(256, "Generate at most N tokens.", low=1, names="-n --max-tokens", metavar="N")
    min_tokens: int = _per_request(
        0, "Don't end within the first N tokens, unless a constraint does.", section="Stopping", low=0, metavar="N"
    )
    stop: tuple[str, ...] = _stopping((), "Stop before this text.", metavar="TEXT")

    def __post_init__(self) -> None:
        if callable(to_schema := getattr(self.json_schema, "model_json_schema", None)):  # a class of pydantic
            self._set("json_schema", to_schema())
        for name, field in options_of(self).items():
            value = _python_number(getattr(self, name))
            self._set(name, _as_tuple(value) if types_of(field)[0].startswith("tuple") else value)
        if self.dry_sequence_breakers == ("",):
            self._set("dry_sequence_breakers", ())
        self._set("logit_bias", _parse_logit_bias(self.logit_bias))
        if isinstance(self.json_schema, Mapping | bool):
            self._set("json_schema", _to_json(self.json_schema))
        if problems := list(self._problems()):
            raise GenerationError("invalid options: " + "; ".join(problems))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def of(cls, other_names: Sequence[str] = (), /, **options: Any) -> Self:
        """Options from keyword arguments.

        Args:
            other_names: Further arguments that the caller accepts; the hint of the error has the nearest names.
            options: The fields.

        Raises:
            GenerationError: For a name that isn't a field, and for invalid values.
        """
        names = [f.name for f in fields(cls)]
        unknown = sorted(set(options) - set(names))
        if unknown:
            hint = " or ".join(get_close_matches(unknown[0], [*other_names, *names], 3, 0))
            raise GenerationError(f"there is no option {', '.join(unknown)}", hint)
        return cls(**options)

    @property
    def constraint(self) -> str | None:
        """The name of the option that constrains the text (json_schema, regex, choice or grammar), or None."""
        return next(iter(self._constraints()), None)

    @property
    def is_deterministic(self) -> bool:
        """`deterministic`, or its default."""
        return self.seed is not None if self.deterministic is None else self.deterministic

    def with_seed(self, seed: int) -> Self:
        """These options with a seed that was drawn or derived, which alone doesn't make a text deterministic."""
        return replace(self, seed=seed, deterministic=bool(self.deterministic))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise GenerationError for a logit_bias or logprobs beyond a vocabulary of this size."""
        if unknown := [token for token in self.logit_bias if token >= vocab_size]:
            raise GenerationError(f"logit_bias names the token {unknown[0]}", f"ids from 0 to {vocab_size - 1}")
        if self.logprobs is not None and self.logprobs > vocab_size:
            raise GenerationError(f"logprobs is {self.logprobs}, and the model has {vocab_size} tokens", "fewer")

    def _constraints(self) -> list[str]:
        return [name for name in _CONSTRAINTS if getattr(self, name) not in (None, ())]

    def _problems(self) -> Iterator[str]:
        yield from range_problems(self)
        if self.temperature == 0:
            # They can remove the most likely token, and greedy decoding has no randomness to choose another one by.
            for name in (one.option for one in FILTERS if one.removes_most_likely):
                if getattr(self, name) != getattr(type(self), name):
                    yield f"{name} needs a temperature above 0 (such as 0.7)"
        yield from _logit_bias_problems(self.logit_bias)
        if is_number(self.min_tokens) and is_number(self.max_tokens) and self.min_tokens > self.max_tokens:
            yield f"min_tokens is {self.min_tokens}, it must be at most max_tokens, which is {self.max_tokens}"
        names = self._constraints()
        if len(names) > 1:
            yield f"{' and '.join(names)} exclude each other (only one of them)"
        if self.json_schema is not None:
            yield from _schema_problems(self.json_schema)
        for name in ("regex", "grammar"):
            if getattr(self, name) == "":
                yield f"{name} is empty ({valid_text(options_of(self)[name])})"
        if isinstance(self.grammar, str) and _GBNF_RULE.search(self.grammar):
            yield f"grammar is in GBNF, the format of llama.cpp ({GRAMMAR_HINT})"
        for name in ("regex", "grammar", "choice"):
            texts = getattr(self, name)
            length = sum(len(text) for text in texts if isinstance(text, str)) if isinstance(texts, str | tuple) else 0
            if length > MAX_SCHEMA_CHARS:
                yield f"{name} is too long (at most {MAX_SCHEMA_CHARS} characters)"


class OptionArguments(PenaltyArguments, total=False):
    """The fields of `GenerationOptions`, as keyword arguments. A test compares them."""

    logit_bias: Mapping[int, float] | Sequence[str]
    json_schema: str | Mapping[str, Any] | bool | type[Any] | None
    regex: str | None
    choice: str | Sequence[str]
    grammar: str | None
    logprobs: int | None
    seed: int | None
    deterministic: bool | None
    max_tokens: int | None
    min_tokens: int
    stop: str | Sequence[str]


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str) or not isinstance(value, Sequence) else tuple(value)


def _python_number(value: Any) -> Any:
    """Python's number for one of NumPy's; anything else unchanged."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _parse_logit_bias(value: Any) -> Any:
    """{id: bias} from a mapping (JSON's keys are strings) or from "id=bias" strings.

    Invalid entries are kept for `_logit_bias_problems`; two biases for one id as a tuple.
    """
    if isinstance(value, Mapping):
        pairs = list(value.items())
    elif isinstance(value, Sequence):
        pairs = [str(text).partition("=")[::2] for text in _as_tuple(value)]
    else:
        return value
    biases: dict[Any, Any] = {}
    for token, bias in pairs:
        token, bias = _number(token, int), _number(bias, float)
        biases[token] = (biases[token], bias) if token in biases else bias
    return biases


def _number(value: Any, kind: type) -> Any:
    try:
        return kind(value) if isinstance(value, str) else _python_number(value)
    except ValueError:
        return value


def _to_json(schema: Mapping[str, Any] | bool) -> Any:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return schema  # reported by `_schema_problems`


def _logit_bias_problems(logit_bias: Any) -> Iterator[str]:
    """Problems of the entries of `logit_bias`."""
    if not isinstance(logit_bias, Mapping):
        yield f"logit_bias is {logit_bias!r} (ids and numbers, such as {{42: -100}})"
        return
    for token, bias in logit_bias.items():
        if not is_int_at_least(token, 0) or token >= 2**31:
            yield f"logit_bias has the token {token!r} (an id, such as 42)"
        elif isinstance(bias, tuple):
            yield f"logit_bias has the token {token} twice (one number for each)"
        elif not (is_number(bias) and -10_000 <= bias <= 10_000):
            yield f"logit_bias of token {token} is {bias!r} (-10000 to 10000, such as -100)"


def _schema_problems(schema: Any) -> Iterator[str]:
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
