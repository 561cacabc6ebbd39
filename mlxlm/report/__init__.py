"""Reports of training runs: `write_report` makes one HTML file of one run, or of several side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxlm.report.page import REPORT_MARKER, render_page
from mlxlm.report.plots import plot_losses, plot_runs
from mlxlm.report.runs import RunHistory, read_run
from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.files import write_bytes

REPORT_FILE, LOSS_PLOT_FILE = "report.html", "loss.png"  # in a run's folder

__all__ = ["LOSS_PLOT_FILE", "REPORT_FILE", "RunHistory", "plot_losses", "plot_runs", "read_run", "write_report"]


def write_report(runs: Sequence[RunHistory], out: Path, defaults: Callable[[int], Mapping[str, Any]]) -> None:
    """Write the report of one or more runs to `out`.

    Args:
        runs: From `read_run`. Runs with the same name are named by as much of their paths as tells them apart.
        out: An HTML file; a previous report is replaced.
        defaults: Returns the default settings for a number of steps, see `TrainSettings.defaults`.

    Raises:
        CheckpointError: `out` is a file that is not a report, or can't be written.
    """
    if out.exists() and not _is_report(out):
        raise CheckpointError(f"{out} already exists and is not a report", "another `out`")
    write_bytes(out, render_page(_with_unique_names(runs), defaults).encode("utf-8", "replace"))


def _with_unique_names(runs: Sequence[RunHistory]) -> list[RunHistory]:
    paths = [run.path.absolute().parts for run in runs]
    renamed = []
    for run, path in zip(runs, paths, strict=True):
        others = [other for other in paths if other != path]
        count = next((n for n in range(1, len(path)) if all(other[-n:] != path[-n:] for other in others)), len(path))
        renamed.append(replace(run, name=str(Path(*path[-count:]))))
    return renamed


def _is_report(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return REPORT_MARKER.encode() in file.read(200)
