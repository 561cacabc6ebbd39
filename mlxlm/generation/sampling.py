"""From logits to a token: settings, filters, and a seeded draw, all on the device."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from mlxlm._mlx import mx
from mlxlm.errors import GenerationError


@dataclass(frozen=True)
class SamplingOptions:
    """How a token is drawn. Raises GenerationError that names every setting that can't work.

    temperature: 0 takes the likeliest token (greedy); 1 the model's own distribution.
    top_k: only the k likeliest tokens; 0 is off.
    top_p: only the likeliest tokens that hold this much probability together; 1 is off.
    min_p: only tokens at least this fraction as likely as the likeliest; 0 is off.
    repetition_penalty: above 1 makes tokens of the last `repetition_window` less likely; 1 is off.
    seed: equal seeds give equal texts; None draws one, which the result reports.
    """

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    repetition_window: int = 64
    seed: int | None = None

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise GenerationError("these settings can't work: " + "; ".join(problems))

    @classmethod
    def of(cls, **settings: Any):
        """The options from keyword arguments. Raises GenerationError for a name that is none of them."""
        names = [f.name for f in fields(cls)]
        unknown = sorted(set(settings) - set(names))
        if unknown:
            raise GenerationError(f"there is no setting {', '.join(unknown)}", "one of " + ", ".join(names))
        return cls(**settings)

    def _problems(self) -> Iterator[str]:
        # Below 0.001 the scaled logits leave float32, and the draw is greedy anyway.
        if self.temperature != 0 and not _within(self.temperature, 0.001, 100):
            yield f"temperature is {self.temperature!r} (0 for greedy, or 0.001 to 100)"
        if not _is_whole(self.top_k, 0):
            yield f"top_k is {self.top_k!r} (a positive whole number, or 0 for off)"
        if not _within(self.top_p, 0, 1) or self.top_p == 0:
            yield f"top_p is {self.top_p!r} (above 0 and at most 1, such as 0.9)"
        if not _within(self.min_p, 0, 1):
            yield f"min_p is {self.min_p!r} (0 to 1, such as 0.05)"
        if not _within(self.repetition_penalty, 0.01, 100):
            yield f"repetition_penalty is {self.repetition_penalty!r} (1 for off, or a bit more, such as 1.1)"
        if not _is_whole(self.repetition_window, 1):
            yield f"repetition_window is {self.repetition_window!r} (a positive whole number, such as 64)"
        if self.seed is not None and not (_is_whole(self.seed, 0) and self.seed < 2**64):
            yield f"seed is {self.seed!r} (a whole number from 0 to 2^64 - 1)"


def _within(value: Any, low: float, high: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def _is_whole(value: Any, smallest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= smallest


def filtered_logits(logits: mx.array, options: SamplingOptions, recent: mx.array | None = None) -> mx.array:
    """The logits that a token is drawn from, `[B, V]` -> float32 `[B, V]`; -inf for a token that can't be.

    `recent` holds the token ids that the repetition penalty applies to, `[N]`. The order is transformers':

    1. repetition penalty: positive logits divided by it, negative ones multiplied (Keskar et al. 2019, 4.1);
    2. temperature: logits divided by it (Ackley et al. 1985), unless it is 0;
    3. top-k (Fan et al. 2018, 5.4);
    4. top-p, the smallest set of the likeliest tokens whose probability, renormalised after top-k, reaches
       top_p (Holtzman et al. 2020, 3.1);
    5. min-p, tokens of at least min_p times the highest probability (Nguyen et al. 2024, 3).

    Tokens exactly as likely as the last one that top-k or top-p keeps stay too.
    """
    logits = logits.astype(mx.float32)
    if options.repetition_penalty != 1 and recent is not None and recent.size:
        seen = mx.broadcast_to(recent[None], (logits.shape[0], recent.size))
        values = mx.take_along_axis(logits, seen, axis=-1)
        penalty = options.repetition_penalty
        values = mx.where(values < 0, values * penalty, values / penalty)
        logits = mx.put_along_axis(logits, seen, values, axis=-1)
    if options.temperature != 0:
        # The shift changes no probability and keeps the likeliest token finite at any temperature.
        logits = (logits - logits.max(axis=-1, keepdims=True)) / options.temperature
    if 0 < options.top_k < logits.shape[-1]:
        smallest = mx.topk(logits, options.top_k, axis=-1).min(axis=-1, keepdims=True)
        logits = mx.where(logits >= smallest, logits, -mx.inf)
    if options.top_p < 1:
        probabilities = mx.softmax(logits, axis=-1)
        ranked = -mx.sort(-probabilities, axis=-1)
        mass_before = mx.cumsum(ranked, axis=-1, inclusive=False)
        smallest = mx.where(mass_before < options.top_p, ranked, mx.inf).min(axis=-1, keepdims=True)
        logits = mx.where(probabilities >= smallest, logits, -mx.inf)
    if options.min_p > 0:
        smallest = logits.max(axis=-1, keepdims=True) + math.log(options.min_p)
        logits = mx.where(logits >= smallest, logits, -mx.inf)
    return logits


def draw_seed() -> int:
    """A seed from the operating system, short enough to be typed again."""
    return int.from_bytes(os.urandom(4), "little")


class Sampler:
    """Draws the tokens of one text: `sampler(logits [1, V]) -> token [1]`, without reading either.

    Token t is drawn with a key that depends on the seed and on t alone (the t-th of a chain of splits from
    `mx.random.key(seed)`), so that a text doesn't depend on what else the process has drawn.
    """

    def __init__(self, options: SamplingOptions, prompt: Sequence[int], seed: int):
        """`prompt`: the ids before the text, which the repetition penalty looks back on."""
        self._options = options
        self._key = mx.random.key(seed)
        self._recent = None
        if options.repetition_penalty != 1:
            self._recent = mx.array(prompt[-options.repetition_window :], mx.int32)

    def __call__(self, logits: mx.array) -> mx.array:
        if self._options.temperature == 0:
            token = mx.argmax(self._greedy_logits(logits), axis=-1)
        else:
            self._key, key = mx.random.split(self._key)
            token = mx.random.categorical(filtered_logits(logits, self._options, self._recent), key=key)
        if self._recent is not None:
            recent = mx.concatenate([self._recent, token.astype(mx.int32)])
            self._recent = recent[-self._options.repetition_window :]
        return token

    def _greedy_logits(self, logits: mx.array) -> mx.array:
        # No filter removes the likeliest token, so that only the penalty can change the choice.
        return logits if self._recent is None else filtered_logits(logits, self._options, self._recent)
