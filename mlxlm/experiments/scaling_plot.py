"""Plots of scaling laws: runs and fits, and lines of equal loss over parameters and tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mlxlm.experiments.scaling_analysis import Analysis
from mlxlm.experiments.scaling_fit import Fit
from mlxlm.plan.scaling_law import FLOPS_PER_PARAM_TOKEN, PowerLaw
from mlxlm.utils.formatting import human_count
from mlxlm.utils.plots import LEGEND_SIZE, count_axis, label_axes, new_figure, save_figure

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
