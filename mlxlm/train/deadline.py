"""How many steps a run has: as many as its settings say, or as many as its time limit allows."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

from mlxlm.train.settings import TrainSettings
from mlxlm.train.train_state import TrainState

_UPDATES = 50  # how often in a run, evenly, the number of steps is computed again; more often towards the end
_MEMORY = 0.1  # of the time limit: step times from longer ago count little
_MIN_CHANGE = 0.01  # of the remaining steps
_PLOT_SECONDS = 2.0  # for loss.png and report.html after the last step
VALIDATION_FRACTION = 0.05  # of the time limit, at most, for validations and the checkpoints of the best of them
_MAX_VALIDATIONS = 20


def num_validations(limit: float, cost: float) -> int:
    """Return how many validations of `cost` seconds a run of `limit` seconds has, including the last one."""
    return max(1, min(_MAX_VALIDATIONS, int(VALIDATION_FRACTION * limit / cost) if cost else _MAX_VALIDATIONS))


class Deadline:
    """The number of steps of a run. With a time limit it changes as the run goes.

    What counts is wall-clock time: steps, validations, saving, and rests between steps. Pauses, and the time between an
    interruption and a resume, don't count. The time of steps, validations, samples and checkpoints is measured; until
    there is a measurement, it is taken from the forecast.

    If `settings.eval_every` is None, validations are spread evenly over the time, see `num_validations`. With
    `settings.repeat_plan` the clock decides nothing: steps and validations are those of the run that is repeated.

    Args:
        settings: The settings of the run.
        state: The state that the run was resumed from; None for a new run. A resumed run continues with its plan.
        forecast: The entry of the log, if there is one.
        now: Clock, in seconds.
        start_time: When the time begins to count; None: now.

    Attributes:
        steps: The number of steps as planned now.
        recorded_elapsed: The value of `elapsed` at the last call of `record_time`.
    """

    def __init__(
        self,
        settings: TrainSettings,
        state: TrainState | None = None,
        forecast: Mapping[str, Any] | None = None,
        now: Callable[[], float] = time.monotonic,
        start_time: float | None = None,
    ):
        self.steps: int = (state and state.steps) or settings.steps
        self._limit, self._now, self._last = settings.time_limit, now, now() if start_time is None else start_time
        self.recorded_elapsed = state.elapsed if state else 0.0
        self._next_update = self.recorded_elapsed
        self._validates_by_time = settings.eval_every is None
        self._save_seconds = 60 * settings.save_minutes
        eval_every = settings.eval_every or 0
        self._every = {"validation": eval_every, "sample": settings.sample_every, "save": settings.save_every}
        plan = settings.repeat_plan or {"steps_changed": [], "validations": []}
        self._steps_changed, self._validations = dict(plan["steps_changed"]), frozenset(plan["validations"])
        plot = min(_PLOT_SECONDS, _MEMORY * self._limit) if self._limit else 0.0
        self._cost = {"validation": 0.0, "sample": 0.0, "save": 0.0, "plot": plot}  # seconds of each
        self._step_seconds = self._step_count = 0.0  # sums over steps, in which older ones fade
        self._compiled = False
        if forecast:
            validation_seconds = forecast["seconds"] - forecast["step_seconds"]
            self._cost["validation"] = validation_seconds / forecast["validations"]
            self._step_seconds, self._step_count = forecast["step_seconds"] / forecast["steps"], 1.0
        # The first checkpoint of a fine-tuning run has not been validated: its next validation is due at once.
        self._next_validation: float = state.next_validation if state else self._interval

    @property
    def state(self) -> dict[str, Any]:
        """The fields `steps`, `elapsed` and `next_validation` of a `TrainState`."""
        return {"steps": self.steps, "elapsed": self.elapsed, "next_validation": self._next_validation}

    @property
    def _interval(self) -> float:
        """Seconds from one validation to the next, with a time limit."""
        cost = self._cost["validation"] + self._cost["save"]
        return self._limit / num_validations(self._limit, cost) if self._limit else 0.0

    @property
    def elapsed(self) -> float:
        """Seconds since the start, without pauses."""
        return self.recorded_elapsed + self._now() - self._last

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the time limit; None without one."""
        return None if self._limit is None else max(0.0, self._limit - self.elapsed)

    def should_validate(self, step: int) -> bool:
        """Whether a validation is due after step `step`."""
        if step == self.steps or step in self._validations:
            return True
        if self._validates_by_time:
            return self._limit is not None and self.elapsed >= self._next_validation
        return self._every["validation"] > 0 and step % self._every["validation"] == 0

    def exclude_pause(self, seconds: float) -> None:
        """Don't count the last `seconds`, a pause."""
        self._last += seconds

    def record_time(self, activity: str | None) -> None:
        """Record what the time since the last call was used for.

        Args:
            activity: "step" (with what belongs to each step), "validation" (with its sample), "sample" or "save"; None
                for what happens once.
        """
        now = self._now()
        seconds, self._last = now - self._last, now
        self.recorded_elapsed += seconds
        if activity == "step" and self._compiled:
            fading = math.exp(-seconds / (_MEMORY * self._limit)) if self._limit else 0.0
            self._step_seconds = self._step_seconds * fading + seconds
            self._step_count = self._step_count * fading + 1
        elif activity == "step":
            self._compiled = True  # the first step takes longer than all others
        elif activity is not None:
            self._cost[activity] = seconds
            if activity == "validation":
                self._next_validation = self.recorded_elapsed + self._interval

    def steps_changed(self, step: int) -> bool:
        """Compute `steps` again after step `step`. Returns whether it changed; the run may end here."""
        if step in self._steps_changed:
            self.steps = self._steps_changed[step]
            return True
        early = self.recorded_elapsed < self._next_update and step < self.steps
        if self._limit is None or not self._step_count or early:
            return False
        left = self._limit - self.recorded_elapsed
        wait = min(self._limit / _UPDATES, 0.1 * left, 0.2 * self.recorded_elapsed)
        self._next_update = self.recorded_elapsed + max(0.0, wait)
        steps = step + self._steps_that_fit(step, left)
        # At the end, some more steps must be worth another validation.
        min_change = _MIN_CHANGE * (step if step == self.steps else self.steps - step)
        if abs(steps - self.steps) < max(1.0, min_change):
            return False
        self.steps = steps
        return True

    def _steps_that_fit(self, step: int, seconds: float) -> int:
        """Return how many more steps fit into `seconds`, with all that happens between them and at the end."""
        step_seconds = self._step_seconds / self._step_count

        def seconds_of(more: int) -> float:
            times = {
                name: (step + more - 1) // every - step // every if every else 0 for name, every in self._every.items()
            }
            if self._validates_by_time:
                times["validation"] = int(more * step_seconds / self._interval)
            times["save"] = max(times["save"], times["validation"])  # each may be the best one, which is saved
            every = self._every["save"]
            if self._save_seconds and not 0 < every * step_seconds <= self._save_seconds:  # some are due by time
                times["save"] += int(more * step_seconds / self._save_seconds)
            between = sum(n * self._cost[name] for name, n in times.items())
            return more * step_seconds + between + sum(self._cost.values())

        return max(0, bisect_right(range(int(max(0.0, seconds) / step_seconds) + 2), seconds, key=seconds_of) - 1)
