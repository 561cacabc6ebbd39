"""Reports of training runs: `write_report` makes one HTML file of one run, or of several side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxlm.errors import CheckpointError
from mlxlm.files import write_bytes
from mlxlm.report.page import MARK, page
from mlxlm.report.runs import read_run

REPORT_FILE = "report.html"  # in a run's folder

__all__ = ["REPORT_FILE", "write_report"]


def write_report(runs: Sequence[Path], out: Path, defaults: Callable[[int], Mapping[str, Any]]) -> None:
    """Write the report of the runs at these paths to `out`. `defaults`: the settings of a run of so many steps where
    nothing is said, as `TrainSettings.defaults` has them.

    Raises CheckpointError or ConfigError for what is no run, and CheckpointError if another file than a report is at
    `out`, or if the disk refuses.
    """
    if out.exists() and not _is_report(out):
        raise CheckpointError(f"{out} is there already, and is no report", "another name for --out")
    write_bytes(out, page([read_run(path) for path in runs], defaults).encode("utf-8", "replace"))


def _is_report(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return MARK.encode() in file.read(200)
