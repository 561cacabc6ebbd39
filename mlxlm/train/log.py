"""`log.jsonl`: what happened in a run, an object a line."""

from __future__ import annotations

import errno
import math
import os
import re
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlxlm.report.log_entries import read_log_lines
from mlxlm.train.events import Event, Step
from mlxlm.utils.errors import CheckpointError, os_errors_as
from mlxlm.utils.files import atomic_write
from mlxlm.utils.json_files import json_line

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_AGAIN_AFTER = 1.0  # seconds, on a full disk


class RunLog:
    """The log at `path`. Lines that a full disk does not take are kept in memory until it does; where steps wait, that
    is tried once a second."""

    def __init__(self, path: Path):
        self.path = path
        self._waiting: list[bytes] = []
        self._again_at = 0.0

    def record(self, event: Event) -> None:
        """Append an event: its name (`not_saved` for NotSaved), its fields but for paths, and, but for steps, the time.

        Raises CheckpointError if the file can't be written for another reason than a full disk.
        """
        fields = {name: _plain(value) for name, value in asdict(event).items() if not isinstance(value, Path)}
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
        if isinstance(event, Step):
            self._waiting.append(json_line({"event": name, **fields}))
            if time.monotonic() < self._again_at:  # each step would try all lines again
                return
        else:
            fields["time"] = datetime.now(UTC).isoformat(timespec="seconds")
            self._waiting.append(json_line({"event": name, **fields}))
        self._write()

    def _write(self) -> None:
        lines = b"".join(self._waiting)
        with os_errors_as(CheckpointError, "write", self.path), self.path.open("ab", buffering=0) as file:
            end, written = file.tell(), 0
            try:
                written = file.write(lines)
            except OSError as error:
                if error.errno not in DISK_FULL_ERRNOS:
                    raise
            if written < len(lines):
                file.truncate(end)  # no half line
                self._again_at = time.monotonic() + _AGAIN_AFTER
            else:
                self._waiting.clear()
                self._again_at = 0.0

    def flush(self) -> None:
        """To the disk, so that a checkpoint is never newer than the log."""
        if self._waiting:
            self._write()
        if self.path.exists():
            with os_errors_as(CheckpointError, "write", self.path), self.path.open("ab") as file:
                os.fsync(file.fileno())

    def rewind(self, step: int, validated: bool) -> set[str]:
        """Drop what was logged after `step`, so that a resumed run doesn't log it twice; with `validated` False the
        validation of `step`, too. Returns the names of the events of `step` that are left."""
        kept, size = set(), 0
        for line, entry in self._until(step, validated):
            size += len(line)
            if entry.get("step") == step:
                kept.add(entry["event"])
        if not self.path.exists() or size == self.path.stat().st_size:
            return kept  # there is nothing to drop, and a full disk would not take it
        with atomic_write(self.path) as file:
            file.writelines(line for line, _ in self._until(step, validated))
        return kept

    def _until(self, step: int, validated: bool) -> Iterator[tuple[bytes, dict[str, Any]]]:
        for line, entry in read_log_lines(self.path):
            at = entry.get("step", 0)
            if at < step or at == step and (validated or entry.get("event") != "validation"):
                yield line, entry


def _plain(value: Any) -> Any:
    """JSON has no infinities: the perplexity of a model that knows nothing overflows."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
