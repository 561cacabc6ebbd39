"""What a grid of runs says: the fits, what they predict, and how far beyond the grid that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxlm.experiments.scaling_fit import EXPONENT_BOUNDS, Fit, ScalingPoint, fit_joint, fit_power, fit_without_largest
from mlxlm.plan.scaling_law import FLOPS_PER_PARAM_TOKEN, ScalingLaw
from mlxlm.utils.errors import ConfigError, DataError
from mlxlm.utils.json_files import read_json

FILE = "scaling.json"
MAX_EXTRAPOLATION = 10.0  # times as many operations as the largest run: from there on a prediction is a guess


@dataclass(frozen=True)
class HoldoutCheck:
    """The largest run, predicted from all others."""

    point: ScalingPoint
    predicted: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class Prediction:
    """The loss of a run that wasn't made, in nats per token. `extrapolation`: its operations, by those of the largest run that
    was."""

    parameters: float
    tokens: float
    loss: float
    interval: tuple[float, float]
    extrapolation: float

    @property
    def far(self) -> bool:
        return self.extrapolation > MAX_EXTRAPOLATION


@dataclass(frozen=True)
class Analysis:
    """`by_parameters` is fitted to the runs of the most tokens (or the most tokens per parameter) of each size,
    `by_tokens` to those of the largest size. What can't be fitted is None, and `missing` says why."""

    points: tuple[ScalingPoint, ...]
    by_parameters: Fit | None
    by_tokens: Fit | None
    joint: Fit | None
    check: HoldoutCheck | None
    missing: tuple[str, ...]

    def predict(self, parameters: float, tokens: float) -> Prediction:
        """Raises DataError where there is no joint fit."""
        fit = self._joint()
        largest = max(p.parameters * p.tokens for p in self.points)
        loss, interval = fit.law.loss(parameters, tokens), fit.interval(lambda law: law.loss(parameters, tokens))
        return Prediction(parameters, tokens, loss, interval, parameters * tokens / largest)

    def best(self, flops: float) -> tuple[Prediction, tuple[float, float]]:
        """The compute-optimal run of so many operations, and the interval of its parameters."""
        fit = self._joint()
        parameters, tokens = fit.law.compute_optimal(flops)
        return self.predict(parameters, tokens), fit.interval(lambda law: law.compute_optimal(flops)[0])

    def to_dict(self) -> dict[str, Any]:
        check = self.check and {
            "run": self.check.point.to_dict(), "predicted": self.check.predicted, "interval": list(self.check.interval),
        }  # fmt: skip
        fits = {name: getattr(self, name) for name in ("by_parameters", "by_tokens", "joint")}
        return {
            "points": [point.to_dict() for point in self.points],
            **{name: fit and fit.to_dict() for name, fit in fits.items()},
            "held_out": check,
            "missing": list(self.missing),
        }

    def _joint(self) -> Fit:
        if self.joint is None:
            raise DataError("there is no joint fit to predict from", "; ".join(self.missing))
        return self.joint


def analyze(points: Sequence[ScalingPoint], by_ratio: bool = False) -> Analysis:
    """All fits of these runs. `by_ratio`: their token counts are multiples of their parameters, so that the longest
    runs of each size share the ratio, not the count."""
    missing = []

    def tried(name: str, fit, *arguments) -> Fit | None:
        try:
            return fit(*arguments)
        except DataError as error:
            missing.append(f"{name}: {error.message}, it takes {error.hint}")
            return None

    longest = max((p.tokens / (p.parameters if by_ratio else 1) for p in points), default=0.0)
    row = [p for p in points if p.tokens / (p.parameters if by_ratio else 1) > 0.99 * longest]
    largest = max((p.parameters for p in points), default=0.0)
    column = [p for p in points if p.parameters == largest]
    by_parameters = tried("L(N)", fit_power, [p.parameters for p in row], [p.loss for p in row])
    by_tokens = tried("L(D)", fit_power, [p.tokens for p in column], [p.loss for p in column])
    joint = tried("L(N, D)", fit_joint, points)
    check = fit_without_largest(points) if joint else None
    if check:
        point, fit = check
        interval = fit.interval(lambda law: law.loss(point.parameters, point.tokens))
        check = HoldoutCheck(point, fit.law.loss(point.parameters, point.tokens), interval)
    return Analysis(tuple(points), by_parameters, by_tokens, joint, check, tuple(missing))


def fit_warnings(analysis: Analysis) -> list[str]:
    """What to keep in mind when reading the fits."""
    said = list(analysis.missing)
    joint = analysis.joint
    if joint:
        said += [f"{name} is at the end of what is allowed: these runs don't tell it" for name in joint.at_bounds]
        most = FLOPS_PER_PARAM_TOKEN * max(p.parameters * p.tokens for p in analysis.points)
        wide = joint.interval(lambda law: law.compute_optimal(most)[0])
        if wide[1] > 4 * wide[0]:
            said.append("the intervals are wide: more runs, or a wider range of sizes and tokens, would narrow them")
    return said


def read_law(folder: Path | str) -> ScalingLaw:
    """The joint law in a folder of `mlxlm scaling`. Raises ConfigError where there is none."""
    path = Path(folder, FILE)
    if not path.is_file():
        raise ConfigError(f"{path} does not exist", "the folder of a mlxlm scaling that has ended")
    values = read_json(path)
    joint = values.get("joint") if isinstance(values, dict) else None
    if not joint:
        raise ConfigError(f"{path} has no joint fit", "the folder of mlxlm scaling, with enough runs for one")
    try:
        law = ScalingLaw(*(float(joint[name]) for name in ("E", "A", "alpha", "B", "beta")))
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError(f"{path}: its joint fit needs E, A, alpha, B and beta") from None
    least, most = EXPONENT_BOUNDS
    scales, exponents = (law.E, law.A, law.B), (law.alpha, law.beta)
    if not all(0 <= x < 1e300 for x in scales) or not all(least <= x <= most for x in exponents):
        raise ConfigError(f"{path}: its joint fit has numbers that no fit gives", "the folder as mlxlm scaling left it")
    return law
