"""Reports of training runs: `write_report` makes one HTML file of one run, or of several side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxlm.report.page import REPORT_MARKER, page
from mlxlm.report.runs import RunHistory, read_run
from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.files import write_bytes

REPORT_FILE = "report.html"  # in a run's folder

__all__ = ["REPORT_FILE", "RunHistory", "read_run", "write_report"]


def write_report(runs: Sequence[RunHistory], out: Path, defaults: Callable[[int], Mapping[str, Any]]) -> None:
    """Write the report of runs that `read_run` has read to `out`. `defaults`: the settings of a run of so many steps
    where nothing is said, as `TrainSettings.defaults` has them.

    Runs of one name go by as much of their paths as tells them apart. Raises CheckpointError if another file than a
    report is at `out`, or if the disk refuses.
    """
    if out.exists() and not _is_report(out):
        raise CheckpointError(f"{out} is there already, and is no report", "another name for --out")
    write_bytes(out, page(_told_apart(runs), defaults).encode("utf-8", "replace"))


def _told_apart(runs: Sequence[RunHistory]) -> list[RunHistory]:
    parts = [run.path.absolute().parts for run in runs]
    found = []
    for run, own in zip(runs, parts, strict=True):
        others = [other for other in parts if other != own]
        count = next((n for n in range(1, len(own)) if all(other[-n:] != own[-n:] for other in others)), len(own))
        found.append(replace(run, name=str(Path(*own[-count:]))))
    return found


def _is_report(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return REPORT_MARKER.encode() in file.read(200)
