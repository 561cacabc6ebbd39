"""Writes the plots of a run: loss.png and report.html."""

from __future__ import annotations

from mlxlm.report import LOSS_PLOT_FILE, REPORT_FILE, plot_losses, read_run, write_report
from mlxlm.train.run import Run
from mlxlm.train.settings import TrainSettings


def plot_run(run: Run) -> None:
    """Write `loss.png` and `report.html` into the run, if a step was logged.

    Raises:
        CheckpointError: A file can't be written.
    """
    history = read_run(run.path)
    if history.steps["step"]:
        plot_losses(history, run.path / LOSS_PLOT_FILE)
        write_report([history], run.path / REPORT_FILE, TrainSettings.defaults)
