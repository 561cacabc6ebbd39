"""Which tokens a draw is among: temperature, top-k, typical, top-p, min-p and XTC, on the device."""

from __future__ import annotations

import math

from mlxlm._mlx import ON_CPU, mx
from mlxlm.generation.options import SamplingOptions
from mlxlm.kernels.exp import exp_nonpositive

_MASS = 2**31  # of all tokens together: masses are whole numbers, whose sums are exact in any order


def filtered_logits(logits: mx.array, options: SamplingOptions, excluding: mx.array | None = None) -> mx.array:
    """The logits that a token is drawn from, `[B, V]` -> float32 `[B, V]`; -inf for a token that can't be.

    In this order, each on what the one before has left:

    1. temperature: logits divided by it (Ackley et al. 1985), unless it is 0;
    2. top-k (Fan et al. 2018, 5.4);
    3. typical: the smallest set of the tokens whose surprise, -log p, is nearest to its mean, the entropy, whose
       probability reaches typical_p (Meister et al. 2022, 3);
    4. top-p: the smallest set of the likeliest tokens whose probability reaches top_p (Holtzman et al. 2020, 3.1);
    5. min-p: tokens of at least min_p times the highest probability (Nguyen et al. 2024, 3);
    6. XTC ("exclude top choices", p-e-w 2024): of the tokens of at least xtc_threshold, if there are two or more, all
       but the least likely are taken away. `excluding`, bool `[B]`, says for which rows; None for none.

    Probabilities are renormalised after each. Tokens exactly as likely as the last one that is kept stay too.
    """
    logits = logits.astype(mx.float32)
    if options.temperature != 0:
        # The shift changes no probability and keeps the likeliest token finite at any temperature.
        logits = (logits - logits.max(axis=-1, keepdims=True)) / options.temperature
    if 0 < options.top_k < logits.shape[-1]:
        smallest = mx.topk(logits, options.top_k, axis=-1).min(axis=-1, keepdims=True)
        logits = mx.where(logits >= smallest, logits, -mx.inf)
    if options.typical_p < 1:
        surprise = mx.logsumexp(logits, axis=-1, keepdims=True) - logits
        probabilities = mx.exp(-surprise)
        mean = mx.where(probabilities > 0, probabilities * surprise, 0).sum(axis=-1, keepdims=True)
        kept = _smallest_set(mx.abs(surprise - mean), probabilities, options.typical_p)
        logits = mx.where(kept, logits, -mx.inf)
    if options.top_p < 1:
        behind = logits.max(axis=-1, keepdims=True) - logits
        kept = _smallest_set(behind, _normalised(behind), options.top_p)
        logits = mx.where(kept, logits, -mx.inf)
    if options.min_p > 0:
        smallest = logits.max(axis=-1, keepdims=True) + math.log(options.min_p)
        logits = mx.where(logits >= smallest, logits, -mx.inf)
    if excluding is not None:
        top = mx.softmax(logits, axis=-1) >= options.xtc_threshold
        weakest = mx.where(top, logits, mx.inf).min(axis=-1, keepdims=True)
        logits = mx.where(top & (logits > weakest) & excluding[:, None], -mx.inf, logits)
    return logits


def _normalised(behind: mx.array) -> mx.array:
    """Probabilities from how far each logit is behind the highest."""
    weights = exp_nonpositive(-behind) if ON_CPU else mx.exp(-behind)
    return weights / weights.sum(axis=-1, keepdims=True)


def _smallest_set(ranks: mx.array, probabilities: mx.array, mass: float) -> mx.array:
    """Bool `[B, V]`: the smallest set of the tokens of lowest rank (float32 >= 0) whose probability reaches `mass`.

    The rank of the last token is found bit by bit, as bits have the order of the numbers: on a CPU in two fifths of the
    time of sorting 128k tokens. Masses are rounded to 2^-31, so that their sums, and with them the set,
    don't depend on the order in which a device adds up.
    """
    bits = ranks.view(mx.int32)
    masses = mx.round(probabilities * _MASS).astype(mx.uint32)
    wanted = mx.maximum((masses.sum(axis=-1, keepdims=True).astype(mx.float32) * mass).astype(mx.uint32), 1)
    last = mx.zeros((ranks.shape[0], 1), mx.int32)
    for place in range(30, -1, -1):  # the largest number that less than `wanted` lies below
        higher = last + (1 << place)
        below = ((bits < higher) * masses).sum(axis=-1, keepdims=True)  # on a CPU faster than mx.where
        last = mx.where(below < wanted, higher, last)
    return (bits <= last) & (masses > 0)
