"""Pictures of training runs: the losses of one run, or several runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxlm.report.curves import Point, block_means
from mlxlm.report.runs import RunHistory
from mlxlm.utils.plots import LEGEND_SIZE, count_axis, label_axes, new_figure, save_figure

_MAX_POINTS = 100  # of a training curve


def plot_losses(run: RunHistory, path: Path) -> None:
    """Draw training and validation loss and the learning rate over tokens, and below them metrics of the loss.

    Of a run with a reward function, draw the mean rewards instead.

    Raises:
        CheckpointError: The file can't be written.
    """
    steps, has_metrics = run.steps, bool(run.loss_metrics) and not run.has_rewards
    figure = new_figure(8, 9 if has_metrics else 4.5)
    axes = figure.add_subplot(2 if has_metrics else 1, 1, 1)
    label_axes(axes, "tokens", run.loss_title)
    count_axis(axes.xaxis)
    points = [(run.x_at_step("tokens", step), value) for step, value in run.loss_points]
    _plot(axes, points, lw=0.8, color="#9ab", label="training")
    if run.best:
        sign = -1 if run.has_rewards else 1
        points = [(run.x_at_step("tokens", v.step), sign * v.loss) for v in run.validations]
        bits = "" if run.loss_metrics else f" = {run.best.bits_per_byte:.3f} bits per byte"
        label = f"validation (best {sign * run.best.loss:.3f}{bits})"
        _plot(axes, points, "o-", ms=3, color="#c33", label=label)
    learning_rate = axes.twinx()
    learning_rate.plot(steps["tokens"], steps["learning_rate"], ":", lw=1, color="#555")
    learning_rate.set_ylabel("learning rate (dotted)")
    learning_rate.set_ylim(bottom=0)
    axes.legend(loc="upper right")
    if has_metrics:
        _plot_loss_metrics(figure.add_subplot(2, 1, 2), run)
    save_figure(figure, path)


def _plot_loss_metrics(axes: Any, run: RunHistory) -> None:
    """Draw the metrics of the loss: training as lines, validation as dots."""
    label_axes(axes, "tokens", "metrics (dots: validation)")
    count_axis(axes.xaxis)
    names = [name for name in sorted(run.loss_metrics) if not name.endswith("loss")]  # whose scale is another one
    for i, name in enumerate(names):
        points = [(run.x_at_step("tokens", step), value) for step, value in run.loss_metrics[name]]
        _plot(axes, block_means(points, _MAX_POINTS), color=f"C{i % 10}", lw=1.3, label=name)
        dots = [(run.x_at_step("tokens", step), value) for step, value in run.validation_metrics.get(name, [])]
        _plot(axes, dots, "o", ms=3, color=f"C{i % 10}")
    axes.legend(fontsize=LEGEND_SIZE)


def plot_runs(runs: Mapping[str, RunHistory], path: Path) -> None:
    """Draw training loss and validation of several named runs over tokens, one color per run.

    Raises:
        CheckpointError: The file can't be written.
    """
    figure = new_figure(12, 4.8)
    training, validation = figure.subplots(1, 2)
    losses: list[float] = []  # after the first tenth, which would leave no room for the differences
    for i, (name, run) in enumerate(runs.items()):
        color = f"C{i % 10}"
        points = block_means(list(zip(run.steps["tokens"], run.steps["loss"], strict=True)), _MAX_POINTS)
        _plot(training, points, color=color, lw=1.3)
        losses += [loss for _, loss in points[len(points) // 10 :]]
        label = name.replace("$", r"\$")  # which would start a formula
        label += f": {run.best.bits_per_byte:.4f}" if run.best else ""
        points = [(run.x_at_step("tokens", v.step), v.bits_per_byte) for v in run.validations]
        _plot(validation, points, "o-", ms=3, color=color, label=label)
    if losses:
        losses.sort()
        low, high = losses[0], losses[int(0.98 * (len(losses) - 1))]  # without spikes
        margin = 0.05 * (high - low) or 0.1
        training.set_ylim(low - margin, high + margin)
    for axes, title in ((training, "training loss (nats per token)"), (validation, "validation (bits per byte)")):
        label_axes(axes, "tokens", title=title)
        count_axis(axes.xaxis)
    if runs:
        figure.legend(loc="outside right upper", title="best", fontsize=LEGEND_SIZE)
    save_figure(figure, path)


def _plot(axes: Any, points: Sequence[Point], *args: Any, **options: Any) -> None:
    axes.plot([x for x, _ in points], [y for _, y in points], *args, **options)
