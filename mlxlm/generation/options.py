"""Generation options: how tokens are sampled, and where a text ends."""

from __future__ import annotations

import json
import numbers
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self, TypedDict

from mlxlm.generation.option_checks import (
    CHECKS,
    GRAMMAR_HINT,
    MAX_SCHEMA_CHARS,
    is_utf8,
    logit_bias_problems,
    schema_problems,
    string_problems,
)
from mlxlm.utils.errors import GenerationError


@dataclass(frozen=True)
class GenerationOptions:
    r"""How tokens are sampled, and where a text ends. NumPy numbers are accepted.

    The steps of `Sampler` apply the options in the order below.

    Attributes:
        logit_bias: {token id: number added to its logit}; also as "id=number" strings.
        repetition_penalty: Above 1, tokens of the last `repetition_context_size` are less likely; 1 is off.
        repetition_context_size: How many tokens the repetition penalty looks back on, prompt included.
        presence_penalty: Subtracted once from the logit of every token generated so far.
        frequency_penalty: Subtracted for each time that a token was generated.
        dry_multiplier: Above 0, a token that would extend a repetition of the last tokens to `length` loses
            dry_multiplier * dry_base ** (length - dry_allowed_length), from `dry_allowed_length` on.
        dry_base: Growth of DRY's penalty with the length of the repetition.
        dry_allowed_length: Length of a repetition from which DRY acts.
        dry_penalty_last_n: How many tokens DRY looks back on.
        dry_sequence_breakers: A token that contains one of these strings ends a repetition; () or "" for none.
        json_schema: JSON schema that the text must match, as text or dict; True for any JSON. At most one of
            `json_schema`, `regex`, `choice` and `grammar` can be set.
        regex: Regular expression that the whole text must match; \d is 0-9.
        choice: Strings of which the text must be one.
        grammar: Lark grammar that the text must match, in llguidance's dialect. Special tokens that it allows are part
            of the text.
        temperature: 0 is greedy; 1 is the model's own distribution.
        top_k: Sample from the k most likely tokens; 0 is off.
        typical_p: Sample from the tokens of most typical surprisal with this total probability; 1 is off.
        top_p: Sample from the most likely tokens with this total probability; 1 is off.
        min_p: Sample from tokens with at least this fraction of the highest probability; 0 is off.
        xtc_probability: How often all tokens of at least `xtc_threshold` probability but the least likely are removed.
        xtc_threshold: See `xtc_probability`.
        seed: Equal seeds give equal texts. None draws one, which the result reports.
        deterministic: The text depends on nothing but its request. On a CPU every text does. On a GPU, where rounding
            depends on what is computed together, such a text is read and decoded by itself, without the prefix cache
            and speculative decoding. None: if the request has a seed of its own, not a drawn or derived one.
        logprobs: 0 reports the log-probability of every sampled token, n also the n most likely tokens; None neither.
            They are those of the model, before all of the above.
        max_tokens: The maximum number of tokens; None for as many as the model's context has room for.
        stop: Strings that end the text and aren't part of it. With a constraint, whichever ends the text first does.

    Raises:
        GenerationError: Naming every option that is invalid.
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
    grammar: str | None = None
    logprobs: int | None = None
    seed: int | None = None
    deterministic: bool | None = None
    max_tokens: int | None = 256
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option in fields(self):
            self._set(option.name, _python_number(getattr(self, option.name)))
        for name in ("dry_sequence_breakers", "choice", "stop"):
            self._set(name, _as_tuple(getattr(self, name)))
        if self.dry_sequence_breakers == ("",):
            self._set("dry_sequence_breakers", ())
        self._set("logit_bias", _parse_logit_bias(self.logit_bias))
        if isinstance(self.json_schema, Mapping | bool):
            self._set("json_schema", _to_json(self.json_schema))
        problems = list(self._problems())
        if problems:
            raise GenerationError("invalid options: " + "; ".join(problems))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @classmethod
    def of(cls, other_names: Sequence[str] = (), /, **options: Any) -> Self:
        """Options from keyword arguments.

        Args:
            other_names: Further arguments that the caller accepts, for the hint of the error.
            options: The fields.

        Raises:
            GenerationError: For a name that isn't a field, and for invalid values.
        """
        names = [f.name for f in fields(cls)]
        unknown = sorted(set(options) - set(names))
        if unknown:
            hint = "one of " + ", ".join([*other_names, *names])
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
        names = ("json_schema", "regex", "choice", "grammar")
        return [name for name in names if getattr(self, name) not in (None, ())]

    def _problems(self) -> Iterator[str]:
        for name, (is_valid, hint) in CHECKS.items():
            if not is_valid(value := getattr(self, name)):
                yield f"{name} is {value!r} ({hint})"
        if self.temperature == 0:
            # Both can remove the most likely token, and greedy decoding has no randomness to choose another one by.
            for name, off in (("typical_p", 1), ("xtc_probability", 0)):
                if getattr(self, name) != off:
                    yield f"{name} needs a temperature above 0 (such as 0.7)"
        yield from string_problems("a dry_sequence_breakers entry", self.dry_sequence_breakers)
        yield from string_problems("a stop string", self.stop)
        yield from logit_bias_problems(self.logit_bias)
        yield from self._constraint_problems()

    def _constraint_problems(self) -> Iterator[str]:
        names = self._constraints()
        if len(names) > 1:
            yield f"{' and '.join(names)} exclude each other (only one of them)"
        if self.json_schema is not None:
            yield from schema_problems(self.json_schema)
        texts = []
        for name, expected in (("regex", "a regular expression, such as [0-9]+"), ("grammar", GRAMMAR_HINT)):
            text = getattr(self, name)
            if text is not None and not (isinstance(text, str) and text and is_utf8(text)):
                yield f"{name} is {text!r} ({expected})"
            texts.append(text if isinstance(text, str) else "")
        problems = list(string_problems("a choice", self.choice))
        yield from problems
        texts.append("" if problems else "".join(self.choice))
        if any(len(text) > MAX_SCHEMA_CHARS for text in texts):
            yield f"{names[0]} is too long (at most {MAX_SCHEMA_CHARS} characters)"


class OptionArguments(TypedDict, total=False):
    """The fields of `GenerationOptions`, as keyword arguments."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    xtc_probability: float
    xtc_threshold: float
    repetition_penalty: float
    repetition_context_size: int
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_sequence_breakers: str | Sequence[str]
    logit_bias: Mapping[int, float] | Sequence[str]
    json_schema: str | Mapping[str, Any] | bool | None
    regex: str | None
    choice: str | Sequence[str]
    grammar: str | None
    logprobs: int | None
    seed: int | None
    deterministic: bool | None
    max_tokens: int | None
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

    Invalid entries are kept for `logit_bias_problems`; two biases for one id as a tuple.
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
        return schema  # reported by `schema_problems`
