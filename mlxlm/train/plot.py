"""The pictures of a run: loss.png and report.html."""

from __future__ import annotations

from pathlib import Path

from mlxlm.report import REPORT_FILE, RunHistory, read_run, write_report
from mlxlm.train.run import Run
from mlxlm.train.settings import TrainSettings
from mlxlm.utils.files import write_figure


def plot_run(run: Run) -> None:
    """Write `loss.png` and `report.html` into the run, if a step was logged. Raises CheckpointError if the disk
    refuses."""
    history = read_run(run.path)
    if history.steps["step"]:
        plot_losses(history, run.path / "loss.png")
        write_report([history], run.path / REPORT_FILE, TrainSettings.defaults)


def plot_losses(history: RunHistory, path: Path) -> None:
    """Draw training and validation loss and the learning rate over tokens."""
    from matplotlib.figure import Figure  # half a second: only where a picture is drawn

    steps = history.steps
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps["tokens"], steps["loss"], lw=0.8, color="#9ab", label="training")
    if history.best:
        x, y = zip(*((history.x_at_step("tokens", step), loss) for step, loss, _ in history.validations), strict=True)
        _, loss, bits = history.best
        label = f"validation (best {loss:.3f} = {bits:.3f} bits per byte)"
        axes.plot(x, y, "o-", ms=3, color="#c33", label=label)
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    rate = axes.twinx()
    rate.plot(steps["tokens"], steps["learning_rate"], ":", lw=1, color="#555")
    rate.set_ylabel("learning rate (dotted)")
    rate.set_ylim(bottom=0)
    axes.legend(loc="upper right")
    write_figure(path, figure)
