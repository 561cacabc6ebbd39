"""Fits of scaling laws to measured losses: robust to outliers, with confidence intervals by bootstrap."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter, itemgetter
from typing import Any, Generic, TypeVar

import numpy as np

from mlxlm.plan.scaling_law import PowerLaw, ScalingLaw
from mlxlm.utils.errors import DataError

HUBER_DELTA = 1e-3  # of the Huber loss of log losses (Hoffmann et al. 2022, D.3)
CONFIDENCE = 0.9  # of the intervals
BOOTSTRAP_SAMPLES = 200
MIN_POINTS = 8  # for a joint fit, which has five parameters
MIN_POINTS_POWER_LAW = 4  # for L(N) or L(D), which have three
EXPONENT_BOUNDS = (0.02, 2.0)  # nothing outside was ever measured; without bounds a straight line has no best exponent
_INITIAL_EXPONENTS = (0.2, 0.7)  # all combinations are tried
_INITIAL_FLOOR = 0.5  # initial irreducible loss, as a fraction of the lowest loss
_MAX_STEPS, _TOLERANCE = 300, 1e-12  # of the minimization; the second is a relative change of the Huber loss
_MIN_DAMPING, _MAX_DAMPING = 1e-12, 1e12
_MAX_FLOOR_STEP = (
    2.0  # a longer one in the log of the irreducible loss can make it 0, from where no gradient leads back
)


Law = TypeVar("Law", bound=PowerLaw | ScalingLaw)


@dataclass(frozen=True)
class ScalingPoint:
    """A finished run.

    Attributes:
        parameters: Number of parameters, embedding included.
        tokens: Number of training tokens.
        loss: Final loss on held-out text, in nats per token.
    """

    parameters: float
    tokens: float
    loss: float


@dataclass(frozen=True)
class Fit(Generic[Law]):
    """A fitted law.

    Attributes:
        law: The law with the smallest Huber loss.
        bootstrap: The laws fitted to the bootstrap samples.
        residuals: log(measured loss / fitted loss) of each point.
        at_bounds: Names of exponents that ended at `EXPONENT_BOUNDS`: the points don't determine them.
    """

    law: Law
    bootstrap: tuple[Law, ...]
    residuals: tuple[float, ...]
    at_bounds: tuple[str, ...]

    def interval(self, statistic: Callable[[Law], float]) -> tuple[float, float]:
        """Return the 90% confidence interval of a statistic of the law."""
        values = np.array([statistic(law) for law in self.bootstrap])
        low, high = np.quantile(values[np.isfinite(values)], [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        return float(low), float(high)

    def to_dict(self) -> dict[str, Any]:
        """Return the law's parameters, their intervals, and the residuals, for JSON."""
        values = asdict(self.law)
        intervals = {name: list(self.interval(attrgetter(name))) for name in values}
        residuals, at_bounds = list(self.residuals), list(self.at_bounds)
        return {**values, "intervals": intervals, "residuals": residuals, "at_bounds": at_bounds}


def fit_joint(points: Sequence[ScalingPoint], resamples: int = BOOTSTRAP_SAMPLES, seed: int = 0) -> Fit[ScalingLaw]:
    """Fit L(N, D) = E + A/N^alpha + B/D^beta (Hoffmann et al. 2022, approach 3).

    The Huber loss of the log losses is minimized from several starting points.

    Args:
        points: The runs.
        resamples: Number of bootstrap samples.
        seed: Of the bootstrap.

    Raises:
        DataError: There are fewer than 8 points, 3 sizes or 3 token counts, or a loss is not a positive number.
    """
    sizes, lengths = {p.parameters for p in points}, {p.tokens for p in points}
    if len(points) < MIN_POINTS or len(sizes) < 3 or len(lengths) < 3:
        raise DataError(
            f"{len(points)} runs of {len(sizes)} sizes and {len(lengths)} token counts are too few for a joint fit",
            f"{MIN_POINTS} runs or more, of 3 sizes and 3 token counts or more",
        )
    log_x = np.log([[p.parameters, p.tokens] for p in points])

    def law(params: np.ndarray) -> ScalingLaw:
        e, a, alpha, b, beta = params
        return ScalingLaw(float(np.exp(e)), float(np.exp(a)), float(alpha), float(np.exp(b)), float(beta))

    return _fit(log_x, [p.loss for p in points], law, ("alpha", "beta"), resamples, seed)


def fit_power(
    xs: Sequence[float], losses: Sequence[float], resamples: int = BOOTSTRAP_SAMPLES, seed: int = 0
) -> Fit[PowerLaw]:
    """Fit L(x) = irreducible_loss + scale / x^exponent, in the same way as `fit_joint`.

    Raises:
        DataError: There are fewer than 4 different x, or a loss is not a positive number.
    """
    if len(set(xs)) < MIN_POINTS_POWER_LAW:
        raise DataError(f"{len(set(xs))} different runs are too few for a power law", f"{MIN_POINTS_POWER_LAW} or more")

    def law(params: np.ndarray) -> PowerLaw:
        return PowerLaw(float(np.exp(params[0])), float(np.exp(params[1])), float(params[2]))

    return _fit(np.log(xs)[:, None], losses, law, ("exponent",), resamples, seed)


# The parameters of a fit with T terms are a vector [1 + 2 T]: the log of the irreducible loss, then for each term the
# log of its scale and its exponent.


def _fit(
    log_x: np.ndarray,
    measured_losses: Sequence[float],
    law: Callable[[np.ndarray], Law],
    exponent_names: tuple[str, ...],
    resamples: int,
    seed: int,
) -> Fit[Law]:
    """Fit a sum of power laws.

    Args:
        log_x: log of the variables, [points, terms].
        measured_losses: One loss for each point.
        law: Makes the law of a vector of parameters.
        exponent_names: Names of the exponents, one for each term.
        resamples: Number of bootstrap samples.
        seed: Of the bootstrap.
    """
    losses = np.array(measured_losses)
    if not (np.isfinite(losses).all() and (losses > 0).all()):
        raise DataError("a loss is not a positive number", "runs that did not diverge")
    log_losses, center = np.log(losses), log_x.mean(axis=0)
    centered = log_x - center  # decorrelates scale and exponent of a term, so that the fit converges quickly
    minima = (_minimize(start, centered, log_losses) for start in _starts(losses, log_x.shape[1]))
    best, _ = min(minima, key=itemgetter(1))
    predicted = _evaluate(best, centered)[0]
    residuals = log_losses - predicted
    # Fitted residuals are smaller than the noise: correct for the degrees of freedom.
    noise = residuals * np.sqrt(len(losses) / max(1, len(losses) - len(best)))
    rng = np.random.default_rng(seed)
    noisy = [predicted + rng.choice(noise, len(losses)) for _ in range(resamples)]
    samples = [_minimize(best, centered, sample)[0] for sample in noisy]
    is_at_bound = [min(abs(x - bound) for bound in EXPONENT_BOUNDS) < 1e-4 for x in best[2::2]]
    at_bounds = tuple(itertools.compress(exponent_names, is_at_bound))
    for params in (best, *samples):  # for the variables from which `center` was not subtracted
        params[1::2] += params[2::2] * center
    laws = [law(params) for params in (best, *samples)]
    return Fit(laws[0], tuple(laws[1:]), tuple(float(r) for r in residuals), at_bounds)


def _starts(losses: np.ndarray, terms: int) -> list[np.ndarray]:
    """Return the starting points. The terms share equally what is above the floor."""
    floor = float(np.log(losses.min()) + np.log(_INITIAL_FLOOR))
    scale = float(np.log((losses.mean() - _INITIAL_FLOOR * losses.min()) / terms))
    return [
        np.array([floor, *itertools.chain.from_iterable((scale, exponent) for exponent in exponents)])
        for exponents in itertools.product(_INITIAL_EXPONENTS, repeat=terms)
    ]


def _evaluate(params: np.ndarray, log_x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the log of the loss, [points], and each term's share of it, [points, 1 + terms], the floor first."""
    log_terms = np.column_stack([np.full(len(log_x), params[0]), params[1::2] - params[2::2] * log_x])
    largest = log_terms.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(log_terms - largest).sum(axis=1, keepdims=True)) + largest
    return log_sum[:, 0], np.exp(log_terms - log_sum)


def _minimize(start: np.ndarray, log_x: np.ndarray, log_losses: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the parameters at the local minimum of the Huber loss, and its value.

    The Levenberg-Marquardt method on iteratively reweighted least squares; steps are projected onto the bounds.
    """
    min_exponent, max_exponent = EXPONENT_BOUNDS
    terms = log_x.shape[1]
    low = np.array([-np.inf, *[-np.inf, min_exponent] * terms])
    high = np.array([log_losses.max(), *[np.inf, max_exponent] * terms])
    params = np.clip(start, low, high)
    cost, residuals, shares = _huber(params, log_x, log_losses)
    damping = 1e-3
    for _ in range(_MAX_STEPS):
        jacobian = np.empty((len(log_x), len(params)))
        jacobian[:, 0], jacobian[:, 1::2], jacobian[:, 2::2] = shares[:, 0], shares[:, 1:], -shares[:, 1:] * log_x
        weighted = jacobian.T * (HUBER_DELTA / np.maximum(np.abs(residuals), HUBER_DELTA))
        gradient, hessian = weighted @ residuals, weighted @ jacobian
        at_bound = (params <= low) & (gradient > 0) | (params >= high) & (gradient < 0)
        free = np.flatnonzero(~at_bound)
        scale = np.diag(np.maximum(hessian.diagonal(), 1e-12 * hessian.diagonal().max()))
        while damping < _MAX_DAMPING:
            step = np.zeros(len(params))
            step[free] = -np.linalg.solve((hessian + damping * scale)[np.ix_(free, free)], gradient[free])
            step[0] = np.clip(step[0], -_MAX_FLOOR_STEP, _MAX_FLOOR_STEP)
            new = np.clip(params + step, low, high)
            new_cost, *others = _huber(new, log_x, log_losses)
            if new_cost < cost:
                break
            damping *= 4
        else:
            break
        improvement = cost - new_cost
        params, cost, (residuals, shares), damping = new, new_cost, others, max(damping / 8, _MIN_DAMPING)
        if improvement < _TOLERANCE * (improvement + cost):
            break
    return params, cost


def _huber(params: np.ndarray, log_x: np.ndarray, log_losses: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """Return the Huber loss, the residuals of the log losses, and the shares of `_evaluate`."""
    predicted, shares = _evaluate(params, log_x)
    residuals = predicted - log_losses
    size = np.abs(residuals)
    inside = np.minimum(size, HUBER_DELTA)
    return float((inside * (size - inside / 2)).sum()), residuals, shares
