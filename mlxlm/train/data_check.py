"""The check that the token shards are unchanged: in a thread, while the first steps are trained."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from mlxlm.data.shards import verify_shards
from mlxlm.train.distributed.process_group import ProcessGroup
from mlxlm.utils.errors import DataError

_FACT = "data_problem"  # by which a rank tells rank 0 how its check ended: "" or what is wrong


class DataCheck:
    """Compares the shards of this rank in `data` with their digests, in the background. Close it.

    Rank 0, which saves, waits for the checks of all ranks: nothing is saved that was learned from changed data.
    """

    def __init__(self, data: Path, process_group: ProcessGroup):
        self._ranks, self._stop = process_group, threading.Event()
        pool = ThreadPoolExecutor(1, "check data")
        self._own = pool.submit(verify_shards, data, self._stop.is_set)
        pool.shutdown(wait=False)
        self._all_passed = False

    @property
    def passed(self) -> bool:
        """Whether this rank's own shards are known to be unchanged."""
        return self._own.done() and self._own.exception() is None

    def close(self) -> None:
        """End it, finished or not."""
        self._stop.set()
        self._own.exception()

    def status(self) -> dict[str, Any]:
        """For the other ranks: nothing as long as the check is going on."""
        if not self._own.done():
            return {}
        error = self._own.exception()
        return {_FACT: "" if error is None else f"rank {self._ranks.rank}: {getattr(error, 'message', error)}"}

    def raise_if_failed(self) -> None:
        """On rank 0: raise DataError if a shard is known by now to have changed on any rank."""
        if not self._all_passed:
            if self._own.done():
                self._own.result()
            self._raise_any(self._ranks.peer_status(_FACT))

    def wait(self) -> None:
        """On rank 0: return once the shards of all ranks are known to be unchanged. Raises DataError, and RankLost."""
        if not self._all_passed:
            self._own.result()
            self._raise_any(self._ranks.wait_for_peer_status(_FACT))
            self._all_passed = True

    def all_passed(self, rank0_passed: bool) -> bool:
        """On another rank, which rank 0 has told whether its own check passed: whether all have. Waits for its own."""
        others = self._ranks.peer_status(_FACT)  # which rank 0 is not among
        return (
            rank0_passed and self._own.exception() is None and len(others) == self._ranks.size - 2 and not any(others)
        )

    def _raise_any(self, problems: list[str]) -> None:
        if problem := next(filter(None, problems), None):
            raise DataError(problem, "the same unchanged files on every machine")
