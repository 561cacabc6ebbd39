"""The samplers that remove tokens: top-n-sigma, top-k, typical, top-p, min-p and XTC, after the temperature.

Each is declared here once: its options in `FilterOptions`, and in `FILTERS` its function, whether its draws can be
certain, and its place in the order. Filters map logits `[R, V]` to logits `[R, V]` and set those of
removed tokens to -inf. Probabilities are renormalized between filters. Tokens exactly as likely as the last kept token
are kept too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from mlxlm.config.option import option

if TYPE_CHECKING:
    from mlxlm.backend.mlx import mx
else:

    class _LazyMLX:
        """`mx`, imported when it is first used: `--help` reads the options of this file."""

        def __getattr__(self, name: str) -> Any:
            from mlxlm.backend.mlx import mx

            return getattr(mx, name)

    mx = _LazyMLX()

TOTAL_MASS = 2**31  # probability 1 as an integer: integer sums are exact in any order

# An array in a compiled function, which is not traced again for another value.
Number: TypeAlias = "mx.array | float"
Numbers: TypeAlias = Mapping[str, Number]

_sampling = partial(option, section="Sampling")
_recommended = partial(_sampling, common=True, generation_config=True)


@dataclass(frozen=True)
class FilterOptions:
    """The temperature, and the options of the filters. They apply in the order of `FILTERS`."""

    temperature: float = _recommended(  # below 0.001 the logits exceed float32, and sampling is greedy anyway
        0.7,
        "Sampling temperature. 0 is greedy; higher values are more random.",
        low=0.001,
        high=100,
        also=0,
        valid="0 for greedy, or 0.001 to 100",
        names="-t --temp --temperature",
    )
    top_k: int = _recommended(0, "Sample from the K most likely tokens; 0 disables it.", low=0)
    top_p: float = _recommended(
        1.0, "Nucleus sampling: the most likely tokens with this total probability; 1 disables it.", above=0, high=1
    )
    min_p: float = _recommended(
        0.0, "Drop tokens less likely than this fraction of the most likely one; 0 disables it.", low=0, high=1
    )
    top_n_sigma: float = _sampling(
        0.0, "Keep tokens with logits up to N standard deviations below the highest; 0 disables it.", low=0, high=100
    )
    typical_p: float = _sampling(
        1.0,
        "Locally typical sampling: the tokens whose surprise is closest to the expected surprise, with this total "
        "probability; 1 disables it.",
        above=0,
        high=1,
    )
    xtc_probability: float = _sampling(
        0.0, "XTC: probability of dropping the most likely tokens at each step; 0 disables it.", low=0, high=1
    )
    xtc_threshold: float = _sampling(
        0.1, "XTC: drop all tokens at least this likely, except the least likely of them.", above=0, high=1
    )


class FilterArguments(TypedDict, total=False):
    """The fields of `FilterOptions`, as keyword arguments."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    top_n_sigma: float
    typical_p: float
    xtc_probability: float
    xtc_threshold: float


@dataclass(frozen=True)
class FilteredLogits:
    """What a filter gets, and gives to the next.

    Attributes:
        logits: float32 `[R, V]`.
        highest: The highest logit of each row, `[R, 1]`; None for 0.
        candidates: The logits `[R, k]` of the tokens that top-k kept, in any order, where it has them.
        xtc_rows: bool `[R]`, the rows that XTC applies to; None for no row.
    """

    logits: mx.array
    highest: mx.array | None = None
    candidates: mx.array | None = None
    xtc_rows: mx.array | None = None


@dataclass(frozen=True)
class LogitFilter:
    """A filter.

    Attributes:
        option: The option that turns it on. The default turns it off.
        apply: Filters logits with the numbers of `numbers`.
        verdict: Returns whether the filter surely keeps a logit, and surely removes another, see `Draw`. None if it
            can't tell: then every draw is computed again alone, which is correct, but slower.
        values: Returns what `apply` needs, from the options and the vocabulary's size; None for the option's value.
        margin_numbers: Returns further numbers for `verdict`, where logits can change by a margin.
        removes_most_likely: Whether it can remove the most likely token, so that greedy decoding can't have it.
    """

    option: str
    apply: Callable[[FilteredLogits, Numbers], FilteredLogits]
    verdict: Callable[[Draw, Numbers], tuple[mx.array, mx.array]] | None = None
    values: Callable[[FilterOptions, int], dict[str, float]] | None = None
    margin_numbers: Callable[[FilterOptions, float, int], dict[str, float]] = lambda options, margin, vocab_size: {}
    removes_most_likely: bool = False

    def numbers(self, options: FilterOptions, vocab_size: int) -> dict[str, float]:
        """The numbers that `apply` needs, of which one has the name of `option`; {} if the filter is off."""
        value = getattr(options, self.option)
        if value == getattr(FilterOptions, self.option):
            return {}
        return {self.option: value} if self.values is None else self.values(options, vocab_size)


@dataclass(frozen=True)
class Draw:
    """A draw whose token no change of the logits by half the margin may change.

    Attributes:
        logits: The logits before the filters, `[R, V]`; the highest of a row is 0.
        filtered: The logits after them.
        token: The logit of the drawn token, which every filter must keep, `[R, 1]`.
        rival: A logit that one of the filters must remove, `[R, 1]`.
        margin: Twice what a logit can change by.
    """

    logits: mx.array
    filtered: FilteredLogits
    token: mx.array
    rival: mx.array
    margin: Number


def apply_top_n_sigma(x: FilteredLogits, numbers: Numbers) -> FilteredLogits:
    """Keep tokens whose logits are at most n standard deviations below the highest, 0 (Tang et al. 2024).

    Logits of -inf, which a constraint has removed, don't count. The temperature scales both sides.
    """
    is_possible = x.logits > -mx.inf
    count = is_possible.sum(axis=-1, keepdims=True)
    mean = mx.where(is_possible, x.logits, 0).sum(axis=-1, keepdims=True) / count
    variance = mx.where(is_possible, (x.logits - mean).square(), 0).sum(axis=-1, keepdims=True) / count
    return replace(x, logits=mx.where(x.logits >= -numbers["top_n_sigma"] * mx.sqrt(variance), x.logits, -mx.inf))


def apply_top_k(x: FilteredLogits, numbers: Numbers) -> FilteredLogits:
    """Keep the k most likely tokens (Fan et al. 2018, section 5.4).

    On a CPU, their logits are candidates, so that top-p has fewer tokens to sort.
    """
    from mlxlm.backend.mlx import ON_CPU
    from mlxlm.kernels import kth_smallest

    if ON_CPU:
        candidates = mx.topk(x.logits, numbers["top_k"], axis=-1)
        threshold = candidates.min(axis=-1, keepdims=True)
    else:  # on Metal, `mx.topk` sorts
        candidates, threshold = None, -kth_smallest(x.logits, numbers["top_k"])
    return replace(x, logits=mx.where(x.logits >= threshold, x.logits, -mx.inf), candidates=candidates)


def _top_k_verdict(draw: Draw, numbers: Numbers) -> tuple[mx.array, mx.array]:
    threshold, num_ties = _ties(draw)
    return (draw.token >= threshold + draw.margin) | (num_ties == 0), draw.rival < threshold - draw.margin


def _ties(draw: Draw) -> tuple[mx.array, mx.array]:
    """The k-th logit `[R, 1]`, and how many tokens beyond the k-th a change of the logits could tie with it."""
    assert draw.filtered.candidates is not None  # there is no margin on a GPU
    threshold = draw.filtered.candidates.min(axis=-1, keepdims=True)
    num_close = (draw.logits >= threshold - draw.margin).sum(axis=-1, keepdims=True)
    return threshold, num_close - draw.filtered.candidates.shape[-1]


def apply_typical_p(x: FilteredLogits, numbers: Numbers) -> FilteredLogits:
    """Locally typical sampling (Meister et al. 2022, section 3).

    Keep the smallest set of tokens with probability `typical_p` whose surprisal, -log p, is nearest to the entropy.
    """
    from mlxlm.backend.mlx import ON_CPU
    from mlxlm.kernels import weighted_quantile

    normalizer = mx.logsumexp(x.logits, axis=-1, keepdims=True)
    # The surprisal is written in three ways, so that `mx.compile` fuses it with what follows instead of storing it.
    negative = x.logits - normalizer
    probabilities = mx.exp(negative)
    entropy = mx.where(probabilities > 0, -negative * probabilities, 0).sum(axis=-1, keepdims=True)
    masses = _masses(probabilities if ON_CPU else mx.exp(-(normalizer - x.logits)))
    ranks = (-x.logits + normalizer) - entropy
    last = weighted_quantile(ranks, masses, numbers["typical_p"])
    logits = mx.where((mx.abs(ranks) <= last) & (masses > 0), x.logits, -mx.inf)
    return replace(x, logits=logits, highest=logits.max(axis=-1, keepdims=True), candidates=None)


def apply_top_p(x: FilteredLogits, numbers: Numbers) -> FilteredLogits:
    """Nucleus sampling: keep the smallest set of the most likely tokens with probability `top_p`.

    Holtzman et al. 2020, section 3.1.
    """
    from mlxlm.kernels import weighted_quantile
    from mlxlm.kernels.exp import exp_nonpositive
    from mlxlm.kernels.quantile import quantile_by_sorting, target_weight

    below = x.logits if x.highest is None else x.logits - x.highest
    weights = exp_nonpositive(below)
    total = weights.sum(axis=-1, keepdims=True)
    masses = _masses(weights / total)
    if x.candidates is None:
        last = weighted_quantile(below, masses, numbers["top_p"])
    else:  # the missing mass may be that of tokens tied with the last one
        candidate_masses = _masses(exp_nonpositive(x.candidates) / total)
        last = quantile_by_sorting(-x.candidates, candidate_masses, target_weight(masses, numbers["top_p"]))
    return replace(x, logits=mx.where((below >= -last) & (masses > 0), x.logits, -mx.inf))


def _top_p_verdict(draw: Draw, numbers: Numbers) -> tuple[mx.array, mx.array]:
    from mlxlm.kernels.exp import exp_nonpositive

    top, ties = draw.logits, mx.array(0.0)  # the largest weight of tokens beyond the k-th that could tie with it
    if draw.filtered.candidates is not None:  # enough, where top-k alone doesn't decide
        threshold, num_ties = _ties(draw)
        top, ties = draw.filtered.candidates, num_ties * mx.exp(threshold)
    weights = exp_nonpositive(top)
    total = weights.sum(axis=-1, keepdims=True)
    above_token = mx.where(top > draw.token - draw.margin, weights, 0).sum(axis=-1, keepdims=True)
    above_rival = mx.where(top > draw.rival + draw.margin, weights, 0).sum(axis=-1, keepdims=True)
    # The most likely token is kept for any top_p: no mass is above it.
    surely_kept = above_token - mx.exp(draw.token) <= numbers["lowest_top_p"] * total
    return surely_kept, above_rival >= numbers["highest_top_p"] * (total + ties)


def _top_p_margin(options: FilterOptions, margin: float, vocab_size: int) -> dict[str, float]:
    """The probabilities between which a change of the logits can move `top_p`.

    All changes together change the log-odds of a set of tokens by at most the margin.
    """
    log_odds = math.log(options.top_p) - math.log1p(-options.top_p)
    rounding = 1e-6 + 2 * vocab_size / TOTAL_MASS  # of the masses
    low, high = _sigmoid(log_odds - margin) - rounding, _sigmoid(log_odds + margin) + rounding
    return {"lowest_top_p": max(low, 0), "highest_top_p": high}


def apply_min_p(x: FilteredLogits, numbers: Numbers) -> FilteredLogits:
    """Keep tokens with at least `min_p` times the highest probability (Nguyen et al. 2024, section 3)."""
    threshold = numbers["min_p"] if x.highest is None else x.highest + numbers["min_p"]
    return replace(x, logits=mx.where(x.logits >= threshold, x.logits, -mx.inf))


def _min_p_verdict(draw: Draw, numbers: Numbers) -> tuple[mx.array, mx.array]:
    return draw.token >= numbers["min_p"] + draw.margin, draw.rival < numbers["min_p"] - draw.margin


def apply_xtc(x: FilteredLogits, numbers: Numbers) -> FilteredLogits:
    """XTC, "exclude top choices" (p-e-w 2024).

    Of the tokens with probability `xtc_threshold` or more, remove all but the least likely, in the rows of `xtc_rows`.
    """
    if x.xtc_rows is None:
        return x
    top = mx.softmax(x.logits, axis=-1) >= numbers["xtc_threshold"]
    least_likely = mx.where(top, x.logits, mx.inf).min(axis=-1, keepdims=True)
    return replace(x, logits=mx.where((x.logits > least_likely) & x.xtc_rows[:, None], -mx.inf, x.logits))


def _xtc_verdict(draw: Draw, numbers: Numbers) -> tuple[mx.array, mx.array]:
    never = mx.zeros(draw.token.shape, mx.bool_)
    return ~never if draw.filtered.xtc_rows is None else ~draw.filtered.xtc_rows[:, None], never


FILTERS: tuple[LogitFilter, ...] = (
    LogitFilter("top_n_sigma", apply_top_n_sigma),
    LogitFilter(
        "top_k",
        apply_top_k,
        _top_k_verdict,
        lambda options, vocab_size: {"top_k": options.top_k} if options.top_k < vocab_size else {},
    ),
    LogitFilter("typical_p", apply_typical_p, removes_most_likely=True),
    LogitFilter("top_p", apply_top_p, _top_p_verdict, margin_numbers=_top_p_margin),
    LogitFilter("min_p", apply_min_p, _min_p_verdict, lambda options, _: {"min_p": math.log(options.min_p)}),
    LogitFilter(
        "xtc_probability",
        apply_xtc,
        _xtc_verdict,
        lambda options, _: {name: getattr(options, name) for name in ("xtc_probability", "xtc_threshold")},
        removes_most_likely=True,
    ),
)


def filter_numbers(options: FilterOptions, vocab_size: int) -> dict[str, float]:
    """The numbers of the temperature and of the filters that are on, by the names of their options."""
    numbers: dict[str, float] = {"temperature": options.temperature} if options.temperature else {}
    for one in FILTERS:
        numbers |= one.numbers(options, vocab_size)
    return numbers


def apply_temperature(logits: mx.array, highest: mx.array, temperature: Number) -> mx.array:
    """Divide the logits `[B, V]` by `temperature` (Ackley et al. 1985), the highest `[B, 1]` shifted to 0. float32."""
    # The shift changes no probability and keeps the highest logit finite at any temperature.
    return (logits.astype(mx.float32) - highest.astype(mx.float32)) / temperature


def apply_filters(x: FilteredLogits, numbers: Numbers) -> FilteredLogits:
    """Apply the filters that are on; the logits stay the same object if all are off."""
    for one in FILTERS:
        if one.option in numbers:
            x = one.apply(x, numbers)
    return x


def _masses(probabilities: mx.array) -> mx.array:
    """Probabilities in units of 2^-31, uint32: a set of tokens can't depend on the order in which a device adds."""
    return mx.round(probabilities * TOTAL_MASS).astype(mx.uint32)


def _sigmoid(x: float) -> float:
    return (1 + math.tanh(x / 2)) / 2  # doesn't overflow
