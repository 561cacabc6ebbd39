"""Analysis of a grid of runs: the fitted scaling laws, predictions with their confidence intervals, and plots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxlm.experiments.scaling_fit import EXPONENT_BOUNDS, Fit, ScalingPoint, fit_joint, fit_power
from mlxlm.plan.scaling_law import FLOPS_PER_PARAM_TOKEN, PowerLaw, ScalingLaw
from mlxlm.utils.errors import ConfigError, DataError
from mlxlm.utils.formatting import human_count
from mlxlm.utils.json_files import read_json
from mlxlm.utils.plots import LEGEND_SIZE, count_axis, label_axes, new_figure, save_figure

FILE = "scaling.json"
MAX_EXTRAPOLATION = 10.0  # predictions beyond this multiple of the largest run's operations are marked


@dataclass(frozen=True)
class HoldoutCheck:
    """The largest run, predicted from a fit to all other runs.

    Attributes:
        point: The largest run.
        predicted: Its predicted loss, in nats per token.
        interval: 90% confidence interval of `predicted`.
    """

    point: ScalingPoint
    predicted: float
    interval: tuple[float, float]


@dataclass(frozen=True)
class Prediction:
    """The predicted loss of a run that was not trained.

    Attributes:
        parameters: Number of parameters, embedding included.
        tokens: Number of training tokens.
        loss: Predicted loss in nats per token.
        interval: 90% confidence interval of `loss`.
        extrapolation: Its training operations, as a multiple of those of the largest run.
    """

    parameters: float
    tokens: float
    loss: float
    interval: tuple[float, float]
    extrapolation: float

    @property
    def is_extrapolation(self) -> bool:
        """Whether the run is too large for a reliable prediction, see `MAX_EXTRAPOLATION`."""
        return self.extrapolation > MAX_EXTRAPOLATION


@dataclass(frozen=True)
class Analysis:
    """All scaling laws that were fitted to the runs of a grid. A fit is None if there are too few runs.

    Attributes:
        points: The runs.
        by_parameters: L(N), fitted to the runs of each size with the most tokens (or tokens per parameter).
        by_tokens: L(D), fitted to the runs of the largest size.
        joint: L(N, D), fitted to all runs.
        check: The largest run, predicted from the others.
        missing: For each fit that failed, why.
    """

    points: tuple[ScalingPoint, ...]
    by_parameters: Fit[PowerLaw] | None
    by_tokens: Fit[PowerLaw] | None
    joint: Fit[ScalingLaw] | None
    check: HoldoutCheck | None
    missing: tuple[str, ...]

    def predict(self, parameters: float, tokens: float) -> Prediction:
        """Predict the loss of a model with `parameters` after training on `tokens`.

        Raises:
            DataError: There is no joint fit.
        """
        largest = max(p.parameters * p.tokens for p in self.points)
        loss, interval = _predict_loss(self._joint(), parameters, tokens)
        return Prediction(parameters, tokens, loss, interval, parameters * tokens / largest)

    def compute_optimal(self, flops: float) -> tuple[Prediction, tuple[float, float]]:
        """Return the run with the lowest predicted loss for `flops`, and the 90% interval of its parameters.

        Raises:
            DataError: There is no joint fit.
        """
        fit = self._joint()
        parameters, tokens = fit.law.compute_optimal(flops)
        return self.predict(parameters, tokens), fit.interval(lambda law: law.compute_optimal(flops)[0])

    def to_dict(self) -> dict[str, Any]:
        """Return the contents of `scaling.json`."""
        check = self.check and {
            "run": asdict(self.check.point),
            "predicted": self.check.predicted,
            "interval": list(self.check.interval),
        }
        fits = {name: getattr(self, name) for name in ("by_parameters", "by_tokens", "joint")}
        return {
            "points": [asdict(point) for point in self.points],
            **{name: fit and fit.to_dict() for name, fit in fits.items()},
            "held_out": check,
            "missing": list(self.missing),
        }

    def _joint(self) -> Fit[ScalingLaw]:
        if self.joint is None:
            raise DataError("there is no joint fit to predict from", "; ".join(self.missing))
        return self.joint


def analyze(points: Sequence[ScalingPoint], by_ratio: bool = False) -> Analysis:
    """Fit all scaling laws to `points`.

    Args:
        points: The finished runs.
        by_ratio: Whether the token counts are multiples of the parameters. The longest runs of all sizes then share
            the tokens per parameter instead of the tokens.
    """
    missing = []

    def try_fit(name: str, fit: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return fit(*arguments)
        except DataError as error:
            missing.append(f"{name}: {error.message}, it needs {error.hint}")
            return None

    lengths = [p.tokens / (p.parameters if by_ratio else 1) for p in points]
    longest = max(lengths, default=0.0)
    longest_runs = [p for p, length in zip(points, lengths, strict=True) if length > 0.99 * longest]
    max_parameters = max((p.parameters for p in points), default=0.0)
    largest_runs = [p for p in points if p.parameters == max_parameters]
    by_parameters = try_fit("L(N)", fit_power, [p.parameters for p in longest_runs], [p.loss for p in longest_runs])
    by_tokens = try_fit("L(D)", fit_power, [p.tokens for p in largest_runs], [p.loss for p in largest_runs])
    joint = try_fit("L(N, D)", fit_joint, points)
    check = hold_out_largest(points) if joint else None
    return Analysis(tuple(points), by_parameters, by_tokens, joint, check, tuple(missing))


def hold_out_largest(points: Sequence[ScalingPoint]) -> HoldoutCheck | None:
    """Predict the run with the most operations from the others; None if those are too few."""
    largest = max(points, key=lambda p: p.parameters * p.tokens)
    try:
        fit = fit_joint([p for p in points if p is not largest])
    except DataError:
        return None
    predicted, interval = _predict_loss(fit, largest.parameters, largest.tokens)
    return HoldoutCheck(largest, predicted, interval)


def _predict_loss(fit: Fit[ScalingLaw], parameters: float, tokens: float) -> tuple[float, tuple[float, float]]:
    return fit.law.loss(parameters, tokens), fit.interval(lambda law: law.loss(parameters, tokens))


def fit_warnings(analysis: Analysis) -> list[str]:
    """Return reasons to distrust the fits: fits that failed, exponents at their bounds, wide intervals."""
    warnings = list(analysis.missing)
    joint = analysis.joint
    if joint:
        warnings += [f"{name} ended at its bound: these runs don't determine it" for name in joint.at_bounds]
        largest = FLOPS_PER_PARAM_TOKEN * max(p.parameters * p.tokens for p in analysis.points)
        low, high = joint.interval(lambda law: law.compute_optimal(largest)[0])
        if high > 4 * low:
            hint = "more runs, or a wider range of sizes and tokens, would narrow them"
            warnings.append(f"the confidence intervals are wide: {hint}")
    return warnings


def read_law(folder: Path | str) -> ScalingLaw:
    """Read the joint law from the output folder of `mlxlm scaling`.

    Raises:
        ConfigError: There is none, or its numbers are invalid.
    """
    path = Path(folder, FILE)
    if not path.is_file():
        raise ConfigError(f"{path} does not exist", "the --out folder of a finished mlxlm scaling")
    values = read_json(path)
    joint = values.get("joint") if isinstance(values, dict) else None
    if not joint:
        raise ConfigError(f"{path} has no joint fit", "the --out folder of mlxlm scaling, with enough runs")
    try:
        law = ScalingLaw(*(float(joint[name]) for name in ("E", "A", "alpha", "B", "beta")))
    except (KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError(f"{path}: its joint fit needs E, A, alpha, B and beta") from None
    low, high = EXPONENT_BOUNDS
    scales, exponents = (law.E, law.A, law.B), (law.alpha, law.beta)
    if not all(0 <= x < 1e300 for x in scales) or not all(low <= x <= high for x in exponents):
        raise ConfigError(f"{path}: its joint fit has numbers out of range", "fit again with mlxlm scaling --fit-only")
    return law


_FIT_COLOR, _RUN_COLOR = "#c33", "#246"
_LOSS = "loss (nats per token)"


def plot_scaling_law(analysis: Analysis, path: Path, by_ratio: bool = False) -> None:
    """Write three plots: loss over parameters, loss over tokens, and both, each with its fit if there is one.

    Raises:
        CheckpointError: The file can't be written.
    """
    figure = new_figure(15, 4.8)
    sizes, lengths, contours = figure.subplots(1, 3)
    longest = "most tokens per parameter" if by_ratio else "most tokens"
    _plot_losses(sizes, analysis, "parameters", "tokens", analysis.by_parameters, f"line: runs with the {longest}")
    _plot_losses(lengths, analysis, "tokens", "parameters", analysis.by_tokens, "line: runs of the largest model")
    _plot_contours(contours, analysis)
    save_figure(figure, path, dpi=110)


def _plot_losses(axes: Any, analysis: Analysis, x: str, other: str, fit: Fit[PowerLaw] | None, title: str) -> None:
    """Loss over `x` ("parameters" or "tokens"); runs with the same value of `other` are joined."""
    values = sorted({getattr(p, other) for p in analysis.points})
    has_labels = len(values) <= 6
    for i, value in enumerate(values):
        points = sorted((getattr(p, x), p.loss) for p in analysis.points if getattr(p, other) == value)
        gray = str(0.7 * (1 - (i + 1) / len(values)))
        label = f"{human_count(value)} {other}" if has_labels else None
        axes.plot(*zip(*points, strict=True), "o:", ms=4, lw=0.8, color=gray, label=label)
    if fit is not None:
        xs = [getattr(p, x) for p in analysis.points]
        line = np.geomspace(min(xs), 3 * max(xs), 60)
        low, high = np.quantile([law.loss(line) for law in fit.bootstrap], [0.05, 0.95], axis=0)
        axes.fill_between(line, low, high, color=_FIT_COLOR, alpha=0.15, lw=0)
        law = fit.law
        label = f"{law.irreducible_loss:.2f} + {human_count(law.scale)} / x^{law.exponent:.2f}"
        axes.plot(line, law.loss(line), color=_FIT_COLOR, lw=1.4, label=label)
    axes.set_xscale("log")
    count_axis(axes.xaxis, log=True)
    label_axes(axes, x, _LOSS, title)
    if has_labels or fit is not None:
        axes.legend(fontsize=LEGEND_SIZE)


def _plot_contours(axes: Any, analysis: Analysis) -> None:
    """Lines of equal loss over parameters and tokens, the runs as dots, and the compute-optimal frontier."""
    n, d = ([getattr(p, name) for p in analysis.points] for name in ("parameters", "tokens"))
    if analysis.joint is not None:
        law = analysis.joint.law
        x, y = np.geomspace(min(n) / 2, 10 * max(n), 80), np.geomspace(min(d) / 2, 10 * max(d), 80)
        lines = axes.contour(x, y, law.loss(*np.meshgrid(x, y)), levels=12, cmap="viridis_r", linewidths=0.9)
        axes.clabel(lines, fontsize=7, fmt="%.2f")
        budgets = np.geomspace(FLOPS_PER_PARAM_TOKEN * x[0] * y[0], FLOPS_PER_PARAM_TOKEN * x[-1] * y[-1], 60)
        optimal = np.array([law.compute_optimal(budget) for budget in budgets])
        axes.plot(optimal[:, 0], optimal[:, 1], color=_FIT_COLOR, lw=1.6, label="compute-optimal size")
        last = int(np.log10(budgets[-1]))
        for power in range(int(np.ceil(np.log10(budgets[0]))), last + 1):
            label = "equal operations" if power == last else None
            axes.plot(x, 10.0**power / FLOPS_PER_PARAM_TOKEN / x, ":", color="#999", lw=0.8, label=label)
        axes.set_xlim(x[0], x[-1])
        axes.set_ylim(y[0], y[-1])
    axes.plot(n, d, "o", ms=5, color=_RUN_COLOR, label="runs")
    for name in ("x", "y"):
        getattr(axes, f"set_{name}scale")("log")
        count_axis(getattr(axes, f"{name}axis"), log=True)
    label_axes(axes, "parameters", "tokens", f"lines of equal {_LOSS}", grid=False)
    axes.legend(fontsize=LEGEND_SIZE, loc="upper left")
