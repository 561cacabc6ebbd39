"""Checkpoints on a disk that may be full: one that does not fit is put off, and the training goes on."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mlxlm.train.events import CheckpointNotSaved, CheckpointSaved, Paused, Resumed
from mlxlm.train.log import DISK_FULL_ERRNOS, RunLog
from mlxlm.train.run import Run
from mlxlm.train.step import TrainStep
from mlxlm.train.throttle import Throttle
from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.files import has_hard_links
from mlxlm.utils.formatting import human_bytes

_MARGIN = 16 << 20  # bytes left free beside a checkpoint: for the log, the pictures, and everybody else
_AGAIN_AFTER = 60.0  # seconds: a quota is found out by trying only


def free_disk_bytes(path: Path) -> int:
    """What may still be written on the disk of `path`."""
    return shutil.disk_usage(path).free


class CheckpointSaver:
    """Saves `step`'s checkpoints into `run`, each after a look at the room on the disk.

    Where there is not enough, checkpoints go first that this one would put out of `settings.keep` anyway, if that makes
    enough; the last complete one, the best and the last good one never do. `saved` is the last step that is saved.
    """

    def __init__(
        self,
        run: Run,
        step: TrainStep,
        log: RunLog,
        *,
        free: Callable[[Path], int] = free_disk_bytes,
        now: Callable[[], float] = time.monotonic,
    ):
        self.saved: int | None = None
        self._run, self._step, self._log, self._free, self._now = run, step, log, free, now
        self._needed = checkpoint_bytes(step) + _MARGIN
        if not has_hard_links(run.path):  # then the run's own model.safetensors is a copy
            self._needed += sum(array.nbytes for array in step.weights().values())
        self._again_at: float | None = None

    @property
    def retry_due(self) -> bool:
        """Whether a checkpoint was put off for which there is room now."""
        return self._again_at is not None and self._now() >= self._again_at and self._lacking() <= 0

    def save(self, state: dict[str, Any]) -> CheckpointSaved | CheckpointNotSaved:
        """Write the checkpoint of step `state["step"]`, see `Run.save`; NotSaved where the disk is full.

        Raises CheckpointError for what is no matter of room.
        """
        if self._free(self._run.path) < self._needed and self._lacking() <= 0:
            self._run.delete_checkpoints(self._run.expired_checkpoints(upcoming=1))
        if (there := self._free(self._run.path)) < self._needed:
            reason = f"a checkpoint needs {human_bytes(self._needed)}, {human_bytes(there)} of the disk are free"
            hint = f"free {human_bytes(self._lacking())} on the disk of {self._run.path}"
            return self._put_off(state["step"], reason, hint)
        try:
            self._log.flush()
            path = self._run.save(self._step, state)
        except CheckpointError as error:
            if not _full(error):
                raise
            return self._put_off(state["step"], error.message, error.hint)
        self.saved, self._again_at = state["step"], None
        return CheckpointSaved(state["step"], path)

    def _lacking(self) -> int:
        """Bytes that are missing for a checkpoint, with those that it would replace: of files without another name."""
        files = [f.stat() for folder in self._run.expired_checkpoints(upcoming=1) for f in folder.iterdir()]
        replaced = sum(f.st_size for f in files if f.st_nlink == 1)
        return self._needed - self._free(self._run.path) - replaced

    def _put_off(self, done: int, reason: str, hint: str) -> CheckpointNotSaved:
        self._again_at = self._now() + _AGAIN_AFTER
        return CheckpointNotSaved(done, reason, hint)


def save_final_checkpoint(
    saver: CheckpointSaver, throttle: Throttle, state: dict[str, Any], until: Callable[[], bool]
) -> Iterator[CheckpointSaved | CheckpointNotSaved | Paused | Resumed]:
    """Save what a run ends with: where the disk is full, pause until it no longer is, or until `until` says yes.

    Raises CheckpointError where it is not saved at last.
    """
    tries = [saver.save(state)]
    yield tries[0]
    if isinstance(tries[0], CheckpointSaved):
        return

    def saved() -> bool:
        tries.append(saver.save(state))
        return isinstance(tries[-1], CheckpointSaved)

    reason = f"there is no room for the last checkpoint: {tries[0].hint}"
    yield Paused(state["step"], reason)
    seconds = throttle.wait(saved, until)
    if isinstance(tries[-1], CheckpointNotSaved):
        problem = f"what was trained up to step {state['step']} is not saved: {tries[-1].reason}"
        raise CheckpointError(problem, tries[-1].hint)
    yield Resumed(state["step"], reason, seconds)
    yield tries[-1]


def checkpoint_bytes(step: TrainStep) -> int:
    """The size of a checkpoint, but for some kilobytes of names."""
    arrays = [*step.weights().values(), *step.save_state().values()]
    return sum(array.nbytes for array in arrays)


def _full(error: BaseException) -> bool:
    """Whether the disk, or what this user may take of it, was full."""
    cause = error.__cause__
    return getattr(cause, "errno", None) in DISK_FULL_ERRNOS or cause is not None and _full(cause)
