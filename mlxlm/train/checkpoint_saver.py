"""When checkpoints are saved, and saving them on a disk that may be full.

A checkpoint that does not fit is postponed, and the training continues.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from mlxlm.train.events import DISK_FULL_ERRNOS, CheckpointNotSaved, CheckpointSaved, Event, Paused, Resumed, RunLog
from mlxlm.train.run import Run, TrainState
from mlxlm.train.step import TrainStep
from mlxlm.train.throttle import Throttle
from mlxlm.utils.errors import CheckpointError
from mlxlm.utils.formatting import human_bytes

_MARGIN = 16 << 20  # bytes left free after a checkpoint, for the log, the plots and other programs
_RETRY_SECONDS = 60.0  # a quota shows only when writing fails
_NEW_RUN = TrainState()


def free_disk_bytes(path: Path) -> int:
    """Return the free bytes of the disk that holds `path`."""
    return shutil.disk_usage(path).free


class CheckpointSaver:
    """Saves the checkpoints of `step` into `run`, if the disk has room for them.

    If it has not, checkpoints that `save_total_limit` would delete anyway are deleted first, if that makes enough room.
    The last complete checkpoint, the best and the last good one are never deleted.

    Args:
        run: The run.
        step: The training step, whose weights and optimizer state are saved.
        log: Flushed before each checkpoint, so that no checkpoint is newer than the log.
        state: The state of the run at the start, which needs no saving.

    Attributes:
        saved_step: The last step that is saved; 0 if none is.
    """

    def __init__(self, run: Run, step: TrainStep, log: RunLog, state: TrainState = _NEW_RUN):
        self._run, self._step, self._log = run, step, log
        self.saved_step, self._last_attempt = state.step, state.elapsed
        self._needed = checkpoint_bytes(step) + _MARGIN
        self._retry_at: float | None = None

    def is_due(self, step: int, steps: int, elapsed: float) -> bool:
        """Whether to save after step `step` of `steps`, `elapsed` seconds after the start (without pauses)."""
        settings = self._run.settings
        by_time = settings.save_minutes > 0 and elapsed - self._last_attempt >= 60 * settings.save_minutes
        by_steps = step == steps or (settings.save_every > 0 and step % settings.save_every == 0)
        was_postponed = self._retry_at is not None and time.monotonic() >= self._retry_at
        return by_steps or by_time or (was_postponed and self._missing_bytes() <= 0)

    def save(self, state: TrainState, validated: bool = False) -> CheckpointSaved | CheckpointNotSaved | None:
        """Write the checkpoint of step `state.step`, see `Run.save_checkpoint`.

        If that step is saved already, its `state.json` gets the validation that came later (`validated`).

        Returns:
            None if the step was saved already; CheckpointNotSaved if the disk is full.

        Raises:
            CheckpointError: The checkpoint can't be written for another reason.
        """
        if state.step == self.saved_step:
            if validated:
                names = ("elapsed", "next_validation", "validation_loss", "best")
                self._run.update_state(state.step, {name: getattr(state, name) for name in names})
            return None
        self._last_attempt = state.elapsed
        run, free, missing = self._run, free_disk_bytes(self._run.path), self._missing_bytes()
        if missing > 0:
            reason = f"a checkpoint needs {human_bytes(self._needed)}, {human_bytes(free)} of the disk are free"
            return self._postpone(state.step, reason, f"free {human_bytes(missing)} on the disk of {run.path}")
        if free < self._needed:
            run.delete_checkpoints(run.expired_checkpoints(upcoming=1))
        try:
            self._log.flush()
            path = run.save_checkpoint(self._step, state)
        except CheckpointError as error:
            if getattr(error.__cause__, "errno", None) not in DISK_FULL_ERRNOS:
                raise
            return self._postpone(state.step, error.message, error.hint or "")
        self.saved_step, self._retry_at = state.step, None
        return CheckpointSaved(state.step, path)

    def save_final(
        self, state: TrainState, validated: bool, throttle: Throttle, should_stop: Callable[[], bool]
    ) -> Iterator[Event]:
        """Save the last checkpoint of a run. If the disk is full, pause until it is not, or until `should_stop`.

        Raises:
            CheckpointError: It could not be saved in the end.
        """
        event = self.save(state, validated)
        if event:
            yield event
        if not isinstance(event, CheckpointNotSaved):
            return
        events: list[Event] = [event]

        def is_saved() -> bool:
            events.extend(filter(None, [self.save(state)]))
            return isinstance(events[-1], CheckpointSaved)

        reason = f"there is no room for the last checkpoint: {event.hint}"
        yield Paused(state.step, reason)
        seconds = throttle.wait(is_saved, should_stop)
        if isinstance(last := events[-1], CheckpointNotSaved):
            raise CheckpointError(f"the training up to step {state.step} is not saved: {last.reason}", last.hint)
        yield Resumed(state.step, reason, seconds)
        yield last

    def _missing_bytes(self) -> int:
        """Bytes missing for a checkpoint, even after those are deleted that it would replace."""
        files = [f.stat() for folder in self._run.expired_checkpoints(upcoming=1) for f in folder.iterdir()]
        replaced = sum(f.st_size for f in files if f.st_nlink == 1)  # other files stay under another name
        return self._needed - free_disk_bytes(self._run.path) - replaced

    def _postpone(self, step: int, reason: str, hint: str) -> CheckpointNotSaved:
        self._retry_at = time.monotonic() + _RETRY_SECONDS
        return CheckpointNotSaved(step, reason, hint)


def checkpoint_bytes(step: TrainStep) -> int:
    """Return the size of a checkpoint, except for some kilobytes of names."""
    arrays = [*step.weights().values(), *step.save_state().values()]
    return sum(array.nbytes for array in arrays)
