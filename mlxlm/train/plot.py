"""The pictures of a run: loss.png and report.html."""

from __future__ import annotations

from pathlib import Path

from mlxlm.report import REPORT_FILE, RunFacts, read_run, write_report
from mlxlm.train.run import Run
from mlxlm.train.settings import TrainSettings
from mlxlm.utils.files import write_figure


def draw_run(run: Run) -> None:
    """Write `loss.png` and `report.html` into the run, if a step was logged. Raises CheckpointError if the disk
    refuses."""
    facts = read_run(run.path)
    if facts.steps["step"]:
        draw_losses(facts, run.path / "loss.png")
        write_report([facts], run.path / REPORT_FILE, TrainSettings.defaults)


def draw_losses(facts: RunFacts, path: Path) -> None:
    """Draw training and validation loss and the learning rate over tokens."""
    from matplotlib.figure import Figure  # half a second: only where a picture is drawn

    steps = facts.steps
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps["tokens"], steps["loss"], lw=0.8, color="#9ab", label="training")
    if facts.best:
        x, y = zip(*((facts.place("tokens", step), loss) for step, loss, _ in facts.validations), strict=True)
        _, loss, bits = facts.best
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
