"""Checks in a thread that the token shards are unchanged, while the first steps are trained.

Protects from training on changed data: nothing is saved before the checks of all ranks have passed.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mlxlm.data.shards import verify_shards
from mlxlm.train.distributed.process_group import ProcessGroup
from mlxlm.utils.errors import DataError

_STATUS = "data_problem"  # entry of a rank's status: the problem, or "" if the check has passed


class DataCheck:
    """Compares this rank's shards in `data` with their digests, in the background. Close it."""

    def __init__(self, data: Path, process_group: ProcessGroup):
        self._process_group, self._stop = process_group, threading.Event()
        pool = ThreadPoolExecutor(1, "check data")
        self._result = pool.submit(verify_shards, data, self._stop.is_set)
        pool.shutdown(wait=False)
        self._all_passed = False

    def close(self) -> None:
        """End the check, finished or not."""
        self._stop.set()
        self._result.exception()

    def status(self) -> dict[str, Any]:
        """Return the status for the other ranks: nothing while the check is running."""
        if not self._result.done():
            return {}
        error = self._result.exception()
        problem = "" if error is None else f"rank {self._process_group.rank}: {getattr(error, 'message', error)}"
        return {_STATUS: problem}

    def raise_if_failed(self) -> None:
        """On rank 0: raise DataError if a shard is already known to have changed on any rank."""
        if not self._all_passed:
            if self._result.done():
                self._result.result()
            self._raise_first(self._process_group.peer_status(_STATUS))

    def wait(self) -> None:
        """On rank 0: return when the checks of all ranks have passed. Raises DataError or RankLostError."""
        if not self._all_passed:
            self._result.result()
            self._raise_first(self._process_group.wait_for_peer_status(_STATUS))
            self._all_passed = True

    def _raise_first(self, problems: list[str]) -> None:
        if problem := next(filter(None, problems), None):
            raise DataError(problem, "the same unchanged files on every machine")
