"""Entries of a run's log, read back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlxlm.errors import CheckpointError
from mlxlm.reading import opened

_LONGEST = 16 << 20  # bytes of a line; the longest are samples


def read_entries(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a `log.jsonl`, one at a time; none where there is no file.

    Lines that a crash cut off or left empty are no entries. Raises CheckpointError for what can't be read, and for a
    line of more than 16 MB, which no run writes.
    """
    if not path.exists():
        return
    with opened(path, CheckpointError) as file:
        while line := file.readline(_LONGEST):
            if len(line) == _LONGEST:
                hint = "the log of a training run"
                raise CheckpointError(f"{path} has a line of more than {_LONGEST >> 20} MB", hint)
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict) and isinstance(entry.get("event"), str) and _is_step(entry.get("step", 0)):
                yield entry


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
