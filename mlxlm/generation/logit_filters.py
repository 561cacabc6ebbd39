"""Logit filters: temperature, top-k, typical, top-p, min-p and XTC, computed on the device.

Every filter maps logits `[B, V]` to logits `[B, V]` and sets those of removed tokens to -inf. Probabilities are
renormalized between filters. Tokens exactly as likely as the last kept token are kept too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.generation.options import GenerationOptions
from mlxlm.kernels import kth_smallest, weighted_quantile
from mlxlm.kernels.exp import exp_nonpositive
from mlxlm.kernels.quantile import quantile_by_sorting, target_weight

TOTAL_MASS = 2**31  # probability 1 as an integer: integer sums are exact in any order

# An array in a compiled function, which is not traced again for another value.
Number: TypeAlias = "mx.array | float"
Numbers: TypeAlias = Mapping[str, Number]


def filter_numbers(options: GenerationOptions, vocab_size: int) -> dict[str, float]:
    """The numbers of temperature and of the filters that are on, by the names of their options."""
    numbers: dict[str, float] = {"temperature": options.temperature} if options.temperature else {}
    numbers |= {"top_k": options.top_k} if 0 < options.top_k < vocab_size else {}
    numbers |= {name: p for name in ("typical_p", "top_p") if (p := getattr(options, name)) < 1}
    numbers |= {"log_min_p": math.log(options.min_p)} if options.min_p else {}
    return numbers | ({"xtc_threshold": options.xtc_threshold} if options.xtc_probability else {})


def filter_logits(logits: mx.array, options: GenerationOptions, xtc_rows: mx.array | None = None) -> mx.array:
    """Apply temperature, top-k, typical, top-p, min-p and XTC, in this order.

    Args:
        logits: `[B, V]`, any float dtype.
        options: The settings of all rows.
        xtc_rows: bool `[B]`, the rows to apply XTC to. None for no row.

    Returns:
        float32 `[B, V]`, the logits to draw from, shifted so that the highest logit before the filters is 0.
    """
    numbers = filter_numbers(options, logits.shape[-1])
    logits = apply_temperature(logits, logits.max(axis=-1, keepdims=True), numbers.get("temperature", 1))
    return apply_filters(logits, numbers, xtc_rows)[0]


def apply_filters(
    logits: mx.array, numbers: Numbers, xtc_rows: mx.array | None = None
) -> tuple[mx.array, mx.array | None]:
    """Apply the filters that have a number to the logits `[B, V]` of `apply_temperature`; see `filter_logits`.

    Returns:
        The filtered logits, which are `logits` itself if all filters are off; and the candidates of `apply_top_k`.
    """
    candidates = highest = None
    if "top_k" in numbers:
        logits, candidates = apply_top_k(logits, numbers["top_k"])
    if "typical_p" in numbers:
        logits, candidates = apply_typical_p(logits, numbers["typical_p"]), None
        highest = logits.max(axis=-1, keepdims=True)
    if "top_p" in numbers:
        logits = apply_top_p(logits, numbers["top_p"], highest, candidates)
    if "log_min_p" in numbers:
        logits = apply_min_p(logits, numbers["log_min_p"], highest)
    if xtc_rows is not None:
        logits = apply_xtc(logits, numbers["xtc_threshold"], xtc_rows)
    return logits, candidates


def apply_temperature(logits: mx.array, highest: mx.array, temperature: Number) -> mx.array:
    """Divide the logits `[B, V]` by `temperature` (Ackley et al. 1985), the highest `[B, 1]` shifted to 0. float32."""
    # The shift changes no probability and keeps the highest logit finite at any temperature.
    return (logits.astype(mx.float32) - highest.astype(mx.float32)) / temperature


def apply_top_k(logits: mx.array, k: Number) -> tuple[mx.array, mx.array | None]:
    """Keep the `k` most likely tokens (Fan et al. 2018, section 5.4) of logits `[B, V]`, whose highest is 0.

    Returns:
        The filtered logits; and on a CPU the logits `[B, k]` of the kept tokens in any order, for `apply_top_p`.
    """
    if ON_CPU:
        candidates = mx.topk(logits, k, axis=-1)
        threshold = candidates.min(axis=-1, keepdims=True)
    else:  # on Metal, `mx.topk` sorts
        candidates, threshold = None, -kth_smallest(logits, k)
    return mx.where(logits >= threshold, logits, -mx.inf), candidates


def apply_typical_p(logits: mx.array, typical_p: Number) -> mx.array:
    """Locally typical sampling (Meister et al. 2022, section 3).

    Keep the smallest set of tokens with probability `typical_p` whose surprisal, -log p, is nearest to the entropy.
    """
    normalizer = mx.logsumexp(logits, axis=-1, keepdims=True)
    # The surprisal is written in three ways, so that `mx.compile` fuses it with what follows instead of storing it.
    negative = logits - normalizer
    probabilities = mx.exp(negative)
    entropy = mx.where(probabilities > 0, -negative * probabilities, 0).sum(axis=-1, keepdims=True)
    masses = _masses(probabilities if ON_CPU else mx.exp(-(normalizer - logits)))
    ranks = (-logits + normalizer) - entropy
    last = weighted_quantile(ranks, masses, typical_p)
    return mx.where((mx.abs(ranks) <= last) & (masses > 0), logits, -mx.inf)


def apply_top_p(logits: mx.array, top_p: Number, highest: mx.array | None, candidates: mx.array | None) -> mx.array:
    """Nucleus sampling: keep the smallest set of the most likely tokens with probability `top_p`.

    Holtzman et al. 2020, section 3.1.

    Args:
        logits: `[B, V]`.
        top_p: Above 0, below 1.
        highest: The highest logit, `[B, 1]`; None for 0.
        candidates: Those of a preceding `apply_top_k`, so that only these are sorted.
    """
    below = logits - highest if highest is not None else logits
    weights = exp_nonpositive(below)
    total = weights.sum(axis=-1, keepdims=True)
    masses = _masses(weights / total)
    if candidates is None:
        last = weighted_quantile(below, masses, top_p)
    else:  # the missing mass may be that of tokens tied with the last one
        candidate_masses = _masses(exp_nonpositive(candidates) / total)
        last = quantile_by_sorting(-candidates, candidate_masses, target_weight(masses, top_p))
    return mx.where((below >= -last) & (masses > 0), logits, -mx.inf)


def apply_min_p(logits: mx.array, log_min_p: Number, highest: mx.array | None) -> mx.array:
    """Keep tokens with at least min_p times the highest probability (Nguyen et al. 2024, section 3).

    Args:
        logits: `[B, V]`.
        log_min_p: The logarithm of min_p.
        highest: The highest logit, `[B, 1]`; None for 0.
    """
    threshold = log_min_p if highest is None else highest + log_min_p
    return mx.where(logits >= threshold, logits, -mx.inf)


def apply_xtc(logits: mx.array, xtc_threshold: Number, rows: mx.array) -> mx.array:
    """XTC, "exclude top choices" (p-e-w 2024).

    Of the tokens with probability `xtc_threshold` or more, remove all but the least likely.

    Args:
        logits: `[B, V]`.
        xtc_threshold: A probability.
        rows: bool `[B]`, the rows to change.
    """
    top = mx.softmax(logits, axis=-1) >= xtc_threshold
    least_likely = mx.where(top, logits, mx.inf).min(axis=-1, keepdims=True)
    return mx.where((logits > least_likely) & rows[:, None], -mx.inf, logits)


def _masses(probabilities: mx.array) -> mx.array:
    """Probabilities in units of 2^-31, uint32: a set of tokens can't depend on the order in which a device adds."""
    return mx.round(probabilities * TOTAL_MASS).astype(mx.uint32)
