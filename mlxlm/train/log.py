"""`log.jsonl`: what happened in a run, an object a line."""

from __future__ import annotations

import errno
import math
import os
import re
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mlxlm.errors import CheckpointError, os_errors_as
from mlxlm.files import json_line, replaced_file
from mlxlm.report.entries import read_entries
from mlxlm.train.events import Event, Step

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


class RunLog:
    """The log at `path`. Lines that a full disk does not take are kept in memory until it does."""

    def __init__(self, path: Path):
        self.path = path
        self._waiting: list[bytes] = []

    def record(self, event: Event) -> None:
        """Append an event: its name (`not_saved` for NotSaved), its fields but for paths, and, but for steps, the time.

        Raises CheckpointError if the file can't be written for another reason than a full disk.
        """
        fields = {name: _plain(value) for name, value in asdict(event).items() if not isinstance(value, Path)}
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", type(event).__name__).lower()
        time = {} if isinstance(event, Step) else {"time": datetime.now(UTC).isoformat(timespec="seconds")}
        self.append({"event": name, **fields, **time})

    def append(self, entry: dict[str, Any]) -> None:
        self._waiting.append(json_line(entry))
        lines = b"".join(self._waiting)
        with os_errors_as(CheckpointError, "write", self.path), self.path.open("ab", buffering=0) as file:
            end, written = file.tell(), 0
            try:
                written = file.write(lines)
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
            if written < len(lines):
                file.truncate(end)  # no half line
            else:
                self._waiting.clear()

    def flush(self) -> None:
        """To the disk, so that a checkpoint is never newer than the log."""
        if self.path.exists():
            with os_errors_as(CheckpointError, "write", self.path), self.path.open("ab") as file:
                os.fsync(file.fileno())

    def rewind(self, step: int, validated: bool) -> None:
        """Drop what was logged after `step`, so that a resumed run doesn't log it twice; with `validated` False the
        validation of `step`, too."""
        if not self.path.exists():
            return
        with replaced_file(self.path) as file:
            file.writelines(self._until(step, validated))

    def _until(self, step: int, validated: bool) -> Iterator[bytes]:
        for entry in read_entries(self.path):
            at = entry.get("step", 0)
            if at < step or at == step and (validated or entry.get("event") != "validation"):
                yield json_line(entry)


def _plain(value: Any) -> Any:
    """JSON has no infinities: the perplexity of a model that knows nothing overflows."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
