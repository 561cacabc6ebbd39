"""`log.jsonl`: the events of a run, one JSON object per line."""

from __future__ import annotations

import errno
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
from mlxlm.utils.json_files import json_line, without_nonfinite

DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_RETRY_SECONDS = 1.0  # on a full disk


class RunLog:
    """The log at `path`. Lines that don't fit on a full disk stay in memory; writing is tried again once a second."""

    def __init__(self, path: Path):
        self.path = path
        self._pending: list[bytes] = []
        self._retry_at = 0.0

    def record(self, *events: Event | None) -> None:
        """Append events: the name in snake case, the fields except paths, and, except for steps, the time.

        Raises:
            CheckpointError: The file can't be written, for another reason than a full disk.
        """
        for event in filter(None, events):
            self._record(event)

    def _record(self, event: Event) -> None:
        # The perplexity of an untrained model overflows.
        fields = without_nonfinite({k: value for k, value in asdict(event).items() if not isinstance(value, Path)})
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
        is_step = isinstance(event, Step)
        now = {} if is_step else {"time": datetime.now(UTC).isoformat(timespec="seconds")}
        self._pending.append(json_line({"event": name, **fields, **now}))
        if not is_step or time.monotonic() >= self._retry_at:  # else each step would try all lines again
            self._write()

    def _write(self) -> None:
        lines = b"".join(self._pending)
        with os_errors_as(CheckpointError, "write", self.path), self.path.open("ab", buffering=0) as file:
            end, written = file.tell(), 0
            try:
                written = file.write(lines)
            except OSError as error:
                if error.errno not in DISK_FULL_ERRNOS:
                    raise
            if written < len(lines):
                file.truncate(end)  # no half line
                self._retry_at = time.monotonic() + _RETRY_SECONDS
            else:
                self._pending.clear()
                self._retry_at = 0.0

    def flush(self) -> None:
        """Flush the log to the disk, so that a checkpoint is never newer than the log."""
        if self._pending:
            self._write()
        if self.path.exists():
            with os_errors_as(CheckpointError, "write", self.path), self.path.open("ab") as file:
                os.fsync(file.fileno())

    def rewind(self, step: int, validated: bool) -> set[str]:
        """Remove what was logged after `step`, so that a resumed run doesn't log it twice.

        Args:
            step: The step that the run continues after.
            validated: False also removes the validation of `step`.

        Returns:
            The names of the remaining events of `step`.
        """
        remaining, size = set[str](), 0
        for line, entry in self._until(step, validated):
            size += len(line)
            if entry.get("step") == step:
                remaining.add(entry["event"])
        if not self.path.exists() or size == self.path.stat().st_size:
            return remaining  # there is nothing to remove, and no room is needed
        with atomic_write(self.path) as file:
            file.writelines(line for line, _ in self._until(step, validated))
        return remaining

    def _until(self, step: int, validated: bool) -> Iterator[tuple[bytes, dict[str, Any]]]:
        for line, entry in read_log_lines(self.path):
            at = entry.get("step", 0)
            if at < step or at == step and (validated or entry.get("event") != "validation"):
                yield line, entry
