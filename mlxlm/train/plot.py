"""The pictures of a run: loss.png and report.html."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from mlxlm.files import write_bytes
from mlxlm.report import REPORT_FILE, write_report
from mlxlm.train.run import Run
from mlxlm.train.settings import TrainSettings


def draw_run(run: Run) -> None:
    """Write `loss.png` and `report.html` into the run, if a step was logged. Raises CheckpointError if the disk
    refuses."""
    entries = run.read_log()
    if any(entry["event"] == "step" for entry in entries):
        draw_losses(entries, run.path / "loss.png")
        write_report([run.path], run.path / REPORT_FILE, TrainSettings.defaults)


def draw_losses(entries: list[dict[str, Any]], path: Path) -> None:
    """Draw training and validation loss and the learning rate over tokens, from the entries of a log."""
    from matplotlib.figure import Figure  # half a second: only where a picture is drawn

    steps = [e for e in entries if e["event"] == "step"]
    validations = [e for e in entries if e["event"] == "validation"]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([e["tokens"] for e in steps], [e["loss"] for e in steps], lw=0.8, color="#9ab", label="training")
    if validations:
        x, y = [e["tokens"] for e in validations], [e["loss"] for e in validations]
        best = min(validations, key=lambda e: e["loss"])
        label = f"validation (best {best['loss']:.3f} = {best['bits_per_byte']:.3f} bits per byte)"
        axes.plot(x, y, "o-", ms=3, color="#c33", label=label)
    axes.set_xlabel("tokens")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    rate = axes.twinx()
    rate.plot([e["tokens"] for e in steps], [e["learning_rate"] for e in steps], ":", lw=1, color="#555")
    rate.set_ylabel("learning rate (dotted)")
    rate.set_ylim(bottom=0)
    axes.legend(loc="upper right")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    write_bytes(path, picture.getvalue())
