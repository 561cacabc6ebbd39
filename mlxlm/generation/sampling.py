"""From logits to a token: settings, filters, and a seeded draw, all on the device."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from mlxlm._mlx import mx
from mlxlm.generation.options import SamplingOptions


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
