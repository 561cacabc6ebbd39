"""Which draws are certain: rounding of the logits can't change the token.

A draw is certain if no change of the logits by at most half a margin each could change its token, neither through the
order of the scores nor through what a filter keeps. Every logit is assumed to change in the worst direction, so that a
few draws count as uncertain that aren't.

This is for a CPU alone: see `mlxlm.generation.rounding.margin_for`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from operator import and_, or_

from mlxlm.backend.mlx import mx
from mlxlm.generation.logit_filters import TOTAL_MASS, Number, Numbers
from mlxlm.generation.options import GenerationOptions
from mlxlm.kernels.exp import exp_nonpositive


def margin_numbers(options: GenerationOptions, margin: float, vocab_size: int) -> dict[str, float]:
    """The numbers that the functions of this file need for a margin of the model's logits."""
    # A repetition penalty multiplies or divides differences between logits.
    margin *= max(options.repetition_penalty, 1 / options.repetition_penalty)
    if not options.temperature:
        return {"margin": margin}
    margin /= options.temperature
    if options.top_p == 1:
        return {"margin": margin}
    # All changes together change the log-odds of a set of tokens by at most the margin.
    log_odds = math.log(options.top_p) - math.log1p(-options.top_p)
    rounding = 1e-6 + 2 * vocab_size / TOTAL_MASS  # of the masses in `apply_top_p`
    low, high = _sigmoid(log_odds - margin) - rounding, _sigmoid(log_odds + margin) + rounding
    return {"margin": margin, "lowest_top_p": max(low, 0), "highest_top_p": high}


def certain_draws(scores: mx.array, tokens: mx.array, margin: Number) -> mx.array:
    """Whether draws without filters are certain: whether each token leads the runner-up by the margin.

    Args:
        scores: `[R, V]`.
        tokens: The tokens of the highest scores, int32 `[R]`; -1 for none.
        margin: In units of the scores.

    Returns:
        bool `[R]`.
    """
    tokens = _column(tokens)
    lead = mx.take_along_axis(scores, tokens, axis=-1) - _without(scores, tokens).max(axis=-1, keepdims=True)
    return (lead.astype(mx.float32) >= margin).squeeze(-1)


def certain_filtered_draws(
    logits: mx.array, noise: mx.array, tokens: mx.array, numbers: Numbers, candidates: mx.array | None
) -> mx.array:
    """Whether draws with top-k, top-p and min-p are certain. With typical sampling, none is.

    Without filters, some tokens would lead the drawn one, or follow it by less than the margin; the rival is the most
    likely of them. A draw is certain if every filter surely keeps its token, and one surely removes the rival, and so
    all that are less likely.

    Args:
        logits: What is filtered, float32 `[R, V]`; the highest of a row is 0.
        noise: What is subtracted from the filtered logits, `[R, V]`.
        tokens: The tokens of the highest differences, int32 `[R]`; -1 for none.
        numbers: Those of `filter_numbers` and `margin_numbers`.
        candidates: Those of `apply_top_k`; None if it is off.

    Returns:
        bool `[R]`.
    """
    if "typical_p" in numbers:
        return mx.zeros(tokens.shape, mx.bool_)
    tokens, scores = _column(tokens), logits - noise
    is_close = _without(scores, tokens) > mx.take_along_axis(scores, tokens, axis=-1) - numbers["margin"]
    rival = mx.where(is_close, logits, -mx.inf).max(axis=-1, keepdims=True)
    token = mx.take_along_axis(logits, tokens, axis=-1)
    verdicts = list(_verdicts(logits, token, rival, numbers, candidates))
    removed = reduce(or_, (surely_removed for _, surely_removed in verdicts), mx.isneginf(rival))
    return reduce(and_, (surely_kept for surely_kept, _ in verdicts), removed).squeeze(-1)


def _verdicts(
    logits: mx.array, token: mx.array, rival: mx.array, numbers: Numbers, candidates: mx.array | None
) -> Iterator[tuple[mx.array, mx.array]]:
    """For each filter, whether it surely keeps the logit `token` `[R, 1]`, and surely removes the logit `rival`."""
    margin = numbers["margin"]
    ties: mx.array | float = 0.0  # the largest weight of tokens beyond the k-th that could tie with it
    if candidates is not None:
        threshold = candidates.min(axis=-1, keepdims=True)
        num_ties = (logits >= threshold - margin).sum(axis=-1, keepdims=True) - candidates.shape[-1]
        ties = num_ties * mx.exp(threshold)
        yield (token >= threshold + margin) | (num_ties == 0), rival < threshold - margin
    if "top_p" in numbers:
        top = logits if candidates is None else candidates  # enough, where top-k alone doesn't decide
        weights = exp_nonpositive(top)
        total = weights.sum(axis=-1, keepdims=True)
        above_token = mx.where(top > token - margin, weights, 0).sum(axis=-1, keepdims=True)
        above_rival = mx.where(top > rival + margin, weights, 0).sum(axis=-1, keepdims=True)
        # The most likely token is kept for any top_p: no mass is above it.
        surely_kept = above_token - mx.exp(token) <= numbers["lowest_top_p"] * total
        yield surely_kept, above_rival >= numbers["highest_top_p"] * (total + ties)
    if "log_min_p" in numbers:
        yield token >= numbers["log_min_p"] + margin, rival < numbers["log_min_p"] - margin


def _column(tokens: mx.array) -> mx.array:
    """Tokens `[R]` as indices `[R, 1]`."""
    return mx.expand_dims(mx.maximum(tokens, 0), -1)


def _without(scores: mx.array, tokens: mx.array) -> mx.array:
    """Scores `[R, V]`, with -inf for `tokens` `[R, 1]`."""
    return mx.put_along_axis(scores, tokens, mx.array(-mx.inf, scores.dtype), axis=-1)


def _sigmoid(x: float) -> float:
    return (1 + math.tanh(x / 2)) / 2  # doesn't overflow
