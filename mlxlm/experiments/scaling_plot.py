"""A picture of a scaling law: the runs beside the fits, and where each loss lies over parameters and tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mlxlm.experiments.scaling_analysis import Analysis
from mlxlm.experiments.scaling_fit import Fit
from mlxlm.plan.scaling_law import FLOPS_PER_PARAM_TOKEN
from mlxlm.utils.files import write_figure
from mlxlm.utils.formatting import human_count

_LINE, _DOT = "#c33", "#246"


def plot_scaling_law(analysis: Analysis, path: Path, by_ratio: bool = False) -> None:
    """Write a PNG: loss over parameters, loss over tokens, and both, each with its fit where there is one.

    Raises CheckpointError if the disk refuses.
    """
    from matplotlib.figure import Figure  # half a second: only where a picture is drawn

    figure = Figure(figsize=(15, 4.8), layout="constrained")
    sizes, lengths, plane = figure.subplots(1, 3)
    of = "most tokens per parameter" if by_ratio else "most tokens"
    _row(sizes, analysis, "parameters", "tokens", analysis.by_parameters, f"line: the runs of the {of}")
    _row(lengths, analysis, "tokens", "parameters", analysis.by_tokens, "line: the runs of the largest model")
    _plane(figure, plane, analysis)
    write_figure(path, figure, dpi=110)


def _row(axes, analysis: Analysis, over: str, other: str, fit: Fit | None, title: str) -> None:
    """Loss over one of the two, the runs joined that share a value of the other."""
    shares = sorted({getattr(p, other) for p in analysis.points})
    few = len(shares) <= 6
    for number, value in enumerate(shares):
        points = sorted((getattr(p, over), p.loss) for p in analysis.points if getattr(p, other) == value)
        shade = str(0.7 * (1 - (number + 1) / len(shares)))
        label = f"{human_count(value)} {other}" if few else None
        axes.plot(*zip(*points, strict=True), "o:", ms=4, lw=0.8, color=shade, label=label)
    if fit is not None:
        xs = [getattr(p, over) for p in analysis.points]
        line = np.geomspace(min(xs), 3 * max(xs), 60)
        low, high = np.quantile([law.loss(line) for law in fit.bootstrap], [0.05, 0.95], axis=0)
        axes.fill_between(line, low, high, color=_LINE, alpha=0.15, lw=0)
        law = fit.law
        label = f"{law.irreducible_loss:.2f} + {human_count(law.scale)} / x^{law.exponent:.2f}"
        axes.plot(line, law.loss(line), color=_LINE, lw=1.4, label=label)
    axes.set_xscale("log")
    _counted(axes.xaxis)
    axes.set_xlabel(over)
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3, which="both")
    if few or fit is not None:
        axes.legend(fontsize=8)


def _counted(axis) -> None:
    """100k, 200k, 500k, 1M: over less than a decade powers of ten would be labelled one over another."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(EngFormatter(sep=""))
    axis.set_minor_formatter(NullFormatter())


def _plane(figure, axes, analysis: Analysis) -> None:
    """Lines of equal loss over parameters and tokens, the runs as dots, and the compute-optimal frontier."""
    n, d = ([getattr(p, name) for p in analysis.points] for name in ("parameters", "tokens"))
    if analysis.joint is not None:
        law = analysis.joint.law
        x, y = np.geomspace(min(n) / 2, 10 * max(n), 80), np.geomspace(min(d) / 2, 10 * max(d), 80)
        losses = law.loss(*np.meshgrid(x, y))
        lines = axes.contour(x, y, losses, levels=12, cmap="viridis_r", linewidths=0.9)
        axes.clabel(lines, fontsize=7, fmt="%.2f")
        budgets = np.geomspace(FLOPS_PER_PARAM_TOKEN * x[0] * y[0], FLOPS_PER_PARAM_TOKEN * x[-1] * y[-1], 60)
        best = np.array([law.compute_optimal(budget) for budget in budgets])
        axes.plot(best[:, 0], best[:, 1], color=_LINE, lw=1.6, label="best size for a budget")
        for power in range(int(np.ceil(np.log10(budgets[0]))), int(np.log10(budgets[-1])) + 1):
            label = "equal operations" if power == int(np.log10(budgets[-1])) else None
            axes.plot(x, 10.0**power / FLOPS_PER_PARAM_TOKEN / x, ":", color="#999", lw=0.8, label=label)
        axes.set_xlim(x[0], x[-1])
        axes.set_ylim(y[0], y[-1])
    axes.plot(n, d, "o", ms=5, color=_DOT, label="runs")
    axes.set_xscale("log")
    axes.set_yscale("log")
    _counted(axes.xaxis)
    _counted(axes.yaxis)
    axes.set_xlabel("parameters")
    axes.set_ylabel("tokens")
    axes.set_title("lines of equal loss (nats per token)", fontsize=10)
    axes.legend(fontsize=8, loc="upper left")
