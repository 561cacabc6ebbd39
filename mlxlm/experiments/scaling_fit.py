"""Scaling laws fitted to measured losses: robust to single runs that went astray, with intervals by bootstrap."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from mlxlm.plan.scaling_law import PowerLaw, ScalingLaw
from mlxlm.utils.errors import DataError

HUBER_DELTA = 1e-3  # of the Huber loss of log losses (Hoffmann et al. 2022, D.3)
CONFIDENCE = 0.9  # of intervals
BOOTSTRAP_SAMPLES = 200
MIN_POINTS = 8  # points of a joint fit, which has five numbers to find
MIN_POINTS_POWER_LAW = 4  # points of L(N) or L(D), which have three
EXPONENT_BOUNDS = (0.02, 2.0)  # nothing outside was ever measured; without bounds a straight line has no best exponent
_STARTS = (0.2, 0.7)  # exponents to begin from, in every combination
_FLOOR = 0.5  # and the irreducible loss, as a share of the lowest one


@dataclass(frozen=True)
class ScalingPoint:
    """A run: `parameters` trained on `tokens` came to `loss`, in nats per token of held-out text."""

    parameters: float
    tokens: float
    loss: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True)
class Fit:
    """`law` fits the `points`, whose losses are exp(`residuals`) times what it says; `bootstrap` are the laws of the
    bootstrap. `at_bounds`: exponents that ended at the end of what is allowed, so that the points don't tell them."""

    law: ScalingLaw | PowerLaw
    bootstrap: tuple[ScalingLaw | PowerLaw, ...]
    residuals: tuple[float, ...]
    at_bounds: tuple[str, ...]

    def interval(self, figure: Callable[[ScalingLaw | PowerLaw], float]) -> tuple[float, float]:
        """Within which `figure` of the law is, by the bootstrap, in 9 of 10 cases."""
        found = np.array([figure(law) for law in self.bootstrap])
        low, high = np.quantile(found[np.isfinite(found)], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        return float(low), float(high)

    def to_dict(self) -> dict:
        names = list(self.law.to_dict())
        intervals = {name: list(self.interval(lambda law, name=name: getattr(law, name))) for name in names}
        return {
            **self.law.to_dict(), "intervals": intervals, "residuals": list(self.residuals),
            "at_bounds": list(self.at_bounds),
        }  # fmt: skip


def fit_joint(points: Sequence[ScalingPoint], resamples: int = BOOTSTRAP_SAMPLES, seed: int = 0) -> Fit:
    """L(N, D) = E + A/N^alpha + B/D^beta (Hoffmann et al. 2022, approach 3): the Huber loss of the log losses, by
    trust regions from several beginnings.

    Raises DataError for less than 8 points, 3 sizes or 3 token counts.
    """
    sizes, lengths = {p.parameters for p in points}, {p.tokens for p in points}
    if len(points) < MIN_POINTS or len(sizes) < 3 or len(lengths) < 3:
        raise DataError(
            f"{len(points)} runs of {len(sizes)} sizes and {len(lengths)} token counts are too few for a joint fit",
            f"{MIN_POINTS} runs or more, of 3 sizes and 3 token counts or more",
        )
    where = np.log([[p.parameters, p.tokens] for p in points])

    def law(found: np.ndarray) -> ScalingLaw:
        e, a, alpha, b, beta = found
        return ScalingLaw(float(np.exp(e)), float(np.exp(a)), float(alpha), float(np.exp(b)), float(beta))

    return _fit(where, points, law, ("alpha", "beta"), resamples, seed)


def fit_power(xs: Sequence[float], losses: Sequence[float], resamples: int = BOOTSTRAP_SAMPLES, seed: int = 0) -> Fit:
    """L(x) = floor + scale / x^exponent, as `fit_joint`. Raises DataError for less than 4 different x."""
    if len(set(xs)) < MIN_POINTS_POWER_LAW:
        raise DataError(f"{len(set(xs))} different runs are too few for a power law", f"{MIN_POINTS_POWER_LAW} or more")
    points = [ScalingPoint(x, x, loss) for x, loss in zip(xs, losses, strict=True)]

    def law(found: np.ndarray) -> PowerLaw:
        return PowerLaw(float(np.exp(found[0])), float(np.exp(found[1])), float(found[2]))

    return _fit(np.log(xs)[:, None], points, law, ("exponent",), resamples, seed)


def fit_without_largest(points: Sequence[ScalingPoint]) -> tuple[ScalingPoint, Fit] | None:
    """The run of the most operations, and the joint fit of all the others; None where those are too few."""
    last = max(points, key=lambda p: p.parameters * p.tokens)
    rest = [p for p in points if p is not last]
    try:
        return last, fit_joint(rest)
    except DataError:
        return None


def _fit(
    where: np.ndarray, points: Sequence[ScalingPoint], law, names: tuple[str, ...], resamples: int, seed: int
) -> Fit:
    """where: log x of each point, a column for each term."""
    losses = np.array([p.loss for p in points])
    if not (np.isfinite(losses).all() and (losses > 0).all()):
        raise DataError("a loss is not a positive number", "runs that ended well")
    logs, centre = np.log(losses), where.mean(axis=0)
    centred = where - centre  # of two numbers per term, which would depend on each other, this makes the fit quick
    low = logs.min()
    # Each term has as much of what is above the floor.
    share = float(np.log((losses.mean() - _FLOOR * losses.min()) / where.shape[1]))
    starts = [
        np.array([low + np.log(_FLOOR), *itertools.chain.from_iterable((share, x) for x in xs)])
        for xs in itertools.product(_STARTS, repeat=where.shape[1])
    ]
    best = min((_descended(start, centred, logs) for start in starts), key=lambda found: found[1])[0]
    predicted = _terms(best, centred)[0]
    residuals = logs - predicted
    # What was fitted leaves residuals smaller than the noise: by as much as it has numbers.
    spread = residuals * np.sqrt(len(points) / max(1, len(points) - len(best)))
    draw = np.random.default_rng(seed)
    bootstrap = [_descended(best, centred, predicted + draw.choice(spread, len(points)))[0] for _ in range(resamples)]
    exponents = best[2::2]
    ended = [min(abs(x - bound) for bound in EXPONENT_BOUNDS) < 1e-4 for x in exponents]
    at_bounds = tuple(itertools.compress(names, ended))
    laws = [law(_uncentred(found, centre)) for found in (best, *bootstrap)]
    return Fit(laws[0], tuple(laws[1:]), tuple(float(r) for r in residuals), at_bounds)


def _uncentred(found: np.ndarray, centre: np.ndarray) -> np.ndarray:
    moved = found.copy()
    moved[1::2] += found[2::2] * centre
    return moved


def _terms(found: np.ndarray, where: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """log of the sum of the terms at each point, and the share that each has of it, the floor's first."""
    each = np.column_stack([np.full(len(where), found[0]), found[1::2] - found[2::2] * where])
    top = each.max(axis=1, keepdims=True)
    total = np.log(np.exp(each - top).sum(axis=1, keepdims=True)) + top
    return total[:, 0], np.exp(each - total)


def _descended(start: np.ndarray, where: np.ndarray, logs: np.ndarray) -> tuple[np.ndarray, float]:
    """The minimum of the Huber loss near `start`, and its value."""
    # Not L-BFGS: its BLAS uses threads for five numbers, which took a hundred times longer on two busy cores.
    from scipy.optimize import least_squares

    def slopes(found: np.ndarray) -> np.ndarray:
        shares = _terms(found, where)[1]
        table = np.empty((len(where), len(found)))
        table[:, 0], table[:, 1::2], table[:, 2::2] = shares[:, 0], shares[:, 1:], -shares[:, 1:] * where
        return table

    least, most = EXPONENT_BOUNDS
    terms = where.shape[1]
    low, high = np.array([-np.inf, *[-np.inf, least] * terms]), np.array([logs.max(), *[np.inf, most] * terms])
    inside = np.clip(start, low + 1e-9, high - 1e-9)  # where it must begin
    result = least_squares(
        lambda found: _terms(found, where)[0] - logs, inside, slopes, (low, high), loss="huber", f_scale=HUBER_DELTA,
        max_nfev=300, ftol=1e-12, xtol=1e-10, gtol=1e-12,
    )  # fmt: skip
    return result.x, float(result.cost)
