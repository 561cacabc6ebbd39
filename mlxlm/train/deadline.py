"""How far a run is: by its steps or, with a time limit, by the clock."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from mlxlm.train.settings import TrainSettings
from mlxlm.train.train_state import TrainState

_PLOT_SECONDS = 2.0  # for loss.png and report.html after the last step, but at most a tenth of the time limit
_STEP_WEIGHT = 0.2  # of the latest step in the mean time of a step
VALIDATION_FRACTION = 0.05  # of the time limit, at most, for validations and the checkpoints of the best of them
_MAX_VALIDATIONS = 20


def num_validations(limit: float, cost: float) -> int:
    """Return how many validations of `cost` seconds a run of `limit` seconds has, including the last one."""
    return max(1, min(_MAX_VALIDATIONS, int(VALIDATION_FRACTION * limit / cost) if cost else _MAX_VALIDATIONS))


class Deadline:
    """The end of a run, and the learning rates and validations until then.

    With a time limit, the learning rate is a function of the share of the time that has passed. So it falls as planned
    however fast the steps are.

    What counts is wall-clock time: steps, validations, saving, and rests between steps. Pauses, and the time between an
    interruption and a resume, don't count. The time of the last validation, sample and checkpoint is reserved. It is
    measured; until there is a measurement, it is taken from the forecast.

    If `settings.eval_every` is None, validations are spread evenly over the time, see `num_validations`.

    Args:
        settings: The settings of the run.
        state: The state that the run was resumed from; None for a new run.
        forecast: The entry of the log, if there is one.
        now: Clock, in seconds.
        start_time: When the time begins to count; None: now.
        repeat_plan: Learning rates and validations of the run that is repeated, see `read_repeat_plan`.

    Attributes:
        steps: The number of steps. With a time limit, an estimate until the last step is finished.
        recorded_elapsed: The value of `elapsed` at the last call of `record_time`.
    """

    def __init__(
        self,
        settings: TrainSettings,
        state: TrainState | None = None,
        forecast: Mapping[str, Any] | None = None,
        now: Callable[[], float] = time.monotonic,
        start_time: float | None = None,
        repeat_plan: tuple[Sequence[float], Container[int]] | None = None,
    ):
        self.steps: int = (state and state.steps) or settings.steps
        self._settings, self._limit = settings, settings.time_limit
        self._now, self._last = now, now() if start_time is None else start_time
        self.recorded_elapsed = state.elapsed if state else 0.0
        self._learning_rates, self._validations = repeat_plan or ([], frozenset())
        plot = min(_PLOT_SECONDS, 0.1 * self._limit) if self._limit else 0.0
        self._cost = {"validation": 0.0, "sample": 0.0, "save": 0.0, "plot": plot}  # seconds of each
        self._step_seconds = 0.0
        self._compiled = False
        if forecast:
            validation_seconds = forecast["seconds"] - forecast["step_seconds"]
            self._cost["validation"] = validation_seconds / forecast["validations"]
            self._step_seconds = forecast["step_seconds"] / forecast["steps"]
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

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of the step after step `step`."""
        if self._learning_rates:
            return self._learning_rates[step]
        return self._settings.learning_rate_at(min(1.0, self._progress(step)))

    def _progress(self, step: int) -> float:
        """Return the share of the run that will be over after one more step than `step`; above 1 if it doesn't fit."""
        if self._limit is None:
            return (step + 1) / self.steps
        for_steps = self._limit - sum(self._cost.values())
        return (self.recorded_elapsed + self._step_seconds) / for_steps if for_steps > 0 else math.inf

    def should_validate(self, step: int) -> bool:
        """Whether a validation is due after step `step`."""
        if step == self.steps or step in self._validations:
            return True
        eval_every = self._settings.eval_every
        if eval_every is None:
            return self._limit is not None and self.elapsed >= self._next_validation
        return eval_every > 0 and step % eval_every == 0

    def exclude_pause(self, seconds: float) -> None:
        """Don't count the last `seconds`, a pause."""
        self._last += seconds

    def record_time(self, activity: str | None) -> None:
        """Record what the time since the last call was used for.

        Args:
            activity: "validation" (with its sample), "sample" or "save"; None for what happens once.
        """
        seconds = self._record()
        if activity is not None:
            self._cost[activity] = seconds
            if activity == "validation":
                self._next_validation = self.recorded_elapsed + self._interval

    def record_step(self, step: int) -> None:
        """Record that the time since the last call was used for step `step`, which may be the last one."""
        seconds = self._record()
        if self._compiled:  # the first step takes longer than all others
            weight = _STEP_WEIGHT if self._step_seconds else 1.0
            self._step_seconds += weight * (seconds - self._step_seconds)
        self._compiled = True
        if self._limit is not None:
            progress = self._progress(step)
            self.steps = step if progress > 1 else max(step + 1, round((step + 1) / progress))

    def _record(self) -> float:
        now = self._now()
        seconds, self._last = now - self._last, now
        self.recorded_elapsed += seconds
        return seconds
