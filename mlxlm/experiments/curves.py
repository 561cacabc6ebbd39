"""The curves of several runs in one picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mlxlm.report import RunHistory
from mlxlm.utils.files import write_figure

_POINTS = 100  # of a training curve, each the mean of the steps around it


def plot_runs(runs: Mapping[str, RunHistory], path: Path) -> None:
    """Draw training loss and validation over tokens, a colour for each run of these names, as a PNG at `path`.

    Raises CheckpointError if the disk refuses.
    """
    from matplotlib.figure import Figure  # half a second: only where a picture is drawn
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(12, 4.8), layout="constrained")
    training, validation = figure.subplots(1, 2)
    ends: list[float] = []  # of what is drawn after the first tenth, which would leave no room for the differences
    for number, (name, run) in enumerate(runs.items()):
        color = f"C{number % 10}"
        steps = list(zip(run.steps["tokens"], run.steps["loss"], strict=True))
        points = _means(steps, max(1, -(-len(steps) // _POINTS)))
        training.plot(*zip(*points, strict=True) if points else ((), ()), color=color, lw=1.3)
        ends += [loss for _, loss in points[len(points) // 10 :]]
        checks = [(run.x_at_step("tokens", step), bits) for step, _, bits in run.validations]
        label = name.replace("$", r"\$")  # which would begin a formula
        label += f": {run.best[2]:.4f}" if run.best else ""
        validation.plot(*zip(*checks, strict=True) if checks else ((), ()), "o-", ms=3, color=color, label=label)
    if ends:
        ends.sort()
        low, high = ends[0], ends[int(0.98 * (len(ends) - 1))]  # a spike leaves the picture
        room = 0.05 * (high - low) or 0.1
        training.set_ylim(low - room, high + room)
    for axes, title in ((training, "training loss (nats per token)"), (validation, "validation (bits per byte)")):
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("tokens")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))  # 200k: six zeros run into each other
        axes.grid(alpha=0.3)
    if runs:
        figure.legend(loc="outside right upper", title="best", fontsize=9)
    write_figure(path, figure)


def _means(steps: list[tuple[float, float]], size: int) -> list[tuple[float, float]]:
    """Points that are the mean of `size` steps each."""
    parts = [steps[i : i + size] for i in range(0, len(steps), size)]
    return [(part[-1][0], sum(loss for _, loss in part) / len(part)) for part in parts]
