"""Reads the log of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlxlm.config.numbers import is_int, is_number
from mlxlm.utils.bounded_reads import open_regular
from mlxlm.utils.errors import CheckpointError

LOG_FILE = "log.jsonl"  # in a run's folder
_MAX_LINE = 16 << 20  # bytes; the longest lines are samples


def read_log_entries(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a `log.jsonl`; none if there is no file.

    Lines that a crash cut off or left empty are skipped.

    Raises:
        CheckpointError: The file can't be read, or has a line of more than 16 MB, which no run writes.
    """
    return (entry for _, entry in read_log_lines(path))


def read_log_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each entry of `read_log_entries` with its line, which always ends with a newline.

    To write an entry again, write its line: the entry can have values that JSON lacks, such as NaN.
    """
    if not path.exists():
        return
    with open_regular(path, CheckpointError) as file:
        while line := file.readline(_MAX_LINE):
            if len(line) == _MAX_LINE:
                hint = "the log of a training run"
                raise CheckpointError(f"{path} has a line of more than {_MAX_LINE >> 20} MB", hint)
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(entry, dict) or not isinstance(entry.get("event"), str):
                continue
            if is_int(step := entry.get("step", 0)) and 0 <= step < 2**53:
                yield line.removesuffix(b"\n") + b"\n", entry


def entry_before_start(path: Path, event: str, fields: Sequence[str]) -> dict[str, Any] | None:
    """The first `event` entry before training started whose fields `fields` are all positive; None if there is none."""
    for entry in read_log_entries(path):
        if entry["event"] == event and all(number(entry.get(name)) > 0 for name in fields):
            return entry
        if entry["event"] == "started":
            break
    return None


def number(value: Any) -> float:
    """`value` as a float if it is a finite number, else NaN."""
    is_finite = is_number(value) and abs(value) < 1e300
    return float(value) if is_finite else math.nan
