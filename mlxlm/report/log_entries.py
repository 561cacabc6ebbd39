"""Entries of a run's log, read back."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlxlm.utils.bounded_reads import open_regular
from mlxlm.utils.errors import CheckpointError

_LONGEST = 16 << 20  # bytes of a line; the longest are samples


def read_log_entries(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a `log.jsonl`, one at a time; none where there is no file.

    Lines that a crash cut off or left empty are no entries. Raises CheckpointError for what can't be read, and for a
    line of more than 16 MB, which no run writes.
    """
    return (entry for _, entry in read_log_lines(path))


def read_log_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """What `read_log_entries` reads, each entry behind its line, which has an end even where the file's last one lacks it.

    An entry can have values that JSON lacks, NaN above all: it can't always be written again, its line can.
    """
    if not path.exists():
        return
    with open_regular(path, CheckpointError) as file:
        while line := file.readline(_LONGEST):
            if len(line) == _LONGEST:
                hint = "the log of a training run"
                raise CheckpointError(f"{path} has a line of more than {_LONGEST >> 20} MB", hint)
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict) and isinstance(entry.get("event"), str) and _is_step(entry.get("step", 0)):
                yield line.removesuffix(b"\n") + b"\n", entry


def entry_before_start(path: Path, event: str, figures: Sequence[str]) -> dict[str, Any] | None:
    """The entry of this name from before the run began, if all of `figures` in it are numbers above 0."""
    for entry in read_log_entries(path):
        if entry["event"] == event and all(number(entry.get(name)) > 0 for name in figures):
            return entry
        if entry["event"] == "started":
            break
    return None


def number(value: Any) -> float:
    """A finite number, else NaN."""
    usable = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if usable else math.nan


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
