"""The times of a run: how fast its steps are, how far it is, and when it ends."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from mlxlm.train.run import TrainState
from mlxlm.train.settings import TrainSettings

_PLOT_SECONDS = 2.0  # for loss.png and report.html after the last step, but at most a tenth of the time limit
_STEP_WEIGHT = 0.2  # of the latest step in the mean time of a step
VALIDATION_FRACTION = 0.05  # of the time limit, at most, for validations and the checkpoints of the best of them
_MAX_VALIDATIONS = 20


def num_validations(limit: float, cost: float) -> int:
    """Return how many validations of `cost` seconds a run of `limit` seconds has, including the last one."""
    return max(1, min(_MAX_VALIDATIONS, int(VALIDATION_FRACTION * limit / cost) if cost else _MAX_VALIDATIONS))


class RunClock:
    """How far a run is: by its steps or, with a time limit, by the clock.

    With a time limit, the learning rate is a function of the share of the time that has passed. So it falls as planned
    however fast the steps are.

    What counts is wall-clock time: steps, validations, saving, and rests between steps. Pauses, and the time between an
    interruption and a resume, don't count. The time of the last validation, sample and checkpoint is reserved. It is
    measured; until there is a measurement, it is taken from the forecast.

    If `settings.eval_every` is None, validations are spread evenly over the time, see `num_validations`.

    Args:
        settings: The settings of the run.
        state: The state that the run continues from.
        forecast: The entry of the log, if there is one.
        repeat_plan: Learning rates and validations of the run that is repeated, see `read_repeat_plan`.
        now: Clock, in seconds.
        start_time: When the time begins to count; None: now.

    Attributes:
        steps: The number of steps. With a time limit, an estimate until the last step is finished.
        elapsed: Seconds from the start to the last `lap`, without pauses.
        step_seconds: Total time of all steps, without what is between them.
    """

    def __init__(
        self,
        settings: TrainSettings,
        state: TrainState | None = None,
        forecast: Mapping[str, Any] | None = None,
        repeat_plan: tuple[Sequence[float], Container[int]] | None = None,
        now: Callable[[], float] = time.monotonic,
        start_time: float | None = None,
    ):
        before = state or TrainState()
        self.steps, self.elapsed, self.step_seconds = before.steps or settings.steps, before.elapsed, before.seconds
        self._settings, self._limit, self._plan = settings, settings.time_limit, repeat_plan
        self._now, self._last = now, now() if start_time is None else start_time
        self._recent: deque[float] = deque(maxlen=50)  # seconds of steps; the first one, which compiles, isn't there
        self._first_step = 0.0  # seconds
        self._finished, self._first_end = 0, 0.0  # steps since the start or a resume; `elapsed` after the first of them
        # Seconds of the last of each, and of a step with what is between it and the next one
        self._seconds = {"validation": 0.0, "sample": 0.0, "save": 0.0, "step": 0.0}
        if forecast:
            self._seconds["validation"] = (forecast["seconds"] - forecast["step_seconds"]) / forecast["validations"]
            self._seconds["step"] = forecast["step_seconds"] / forecast["steps"]
        # The first checkpoint of a fine-tuning run has not been validated: its next validation is due at once.
        self._next_validation = state.next_validation if state else self._validation_interval

    @property
    def state(self) -> dict[str, Any]:
        """The fields of a `TrainState` that this clock continues from."""
        elapsed = self.elapsed + self._now() - self._last
        times = {"seconds": self.step_seconds, "elapsed": elapsed, "next_validation": self._next_validation}
        return {"steps": self.steps, **times}

    @property
    def _validation_interval(self) -> float:
        """Seconds from one validation to the next, with a time limit."""
        cost = self._seconds["validation"] + self._seconds["save"]
        return self._limit / num_validations(self._limit, cost) if self._limit else 0.0

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of the step after step `step`."""
        if self._plan:
            return self._plan[0][step]
        return self._settings.learning_rate_at(min(1.0, self._progress(step)), step)

    def _progress(self, step: int) -> float:
        """Return the share of the run that will be over after one more step than `step`; above 1 if it doesn't fit."""
        if self._limit is None:
            return (step + 1) / self.steps
        reserved = sum(self._seconds[name] for name in ("validation", "sample", "save"))
        for_steps = self._limit - reserved - min(_PLOT_SECONDS, 0.1 * self._limit)
        return (self.elapsed + self._seconds["step"]) / for_steps if for_steps > 0 else math.inf

    def should_validate(self, step: int) -> bool:
        """Whether a validation is due after step `step`."""
        if step == self.steps or (self._plan and step in self._plan[1]):
            return True
        if (every := self._settings.eval_every) is None:
            return self._limit is not None and self.state["elapsed"] >= self._next_validation
        return every > 0 and step % every == 0

    @contextmanager
    def measure_step(self) -> Iterator[None]:
        """Measure the block, a step."""
        start = self._now()
        yield
        seconds = self._now() - start
        self.step_seconds += seconds
        if self._finished:
            self._recent.append(seconds)
        else:
            self._first_step = seconds

    def rate(self, tokens: int) -> float:
        """Return tokens per second over the last 50 steps of `tokens` each; 0 before the second step."""
        seconds = sum(self._recent)
        return tokens * len(self._recent) / seconds if seconds else 0.0

    def seconds_left(self, step: int) -> float:
        """Return the time until the run ends, after step `step`, with what is between steps."""
        elapsed = self.state["elapsed"]
        if self._limit is not None:
            return max(0.0, self._limit - elapsed)
        each = (elapsed - self._first_end) / self._finished if self._finished else self._first_step
        return each * (self.steps - step)

    def exclude_pause(self, seconds: float) -> None:
        """Don't count the last `seconds`, a pause."""
        self._last += seconds

    def lap(self, activity: str | None, step: int) -> None:
        """Record what the time since the last call was used for, after step `step`.

        Args:
            activity: "step", "validation" (with its sample), "sample" or "save"; None for what happens once.
            step: The last finished step. If it is the last one that fits in the time, it becomes `steps`.
        """
        now = self._now()
        seconds, self._last = now - self._last, now
        self.elapsed += seconds
        if activity == "step":
            self._finished += 1
            if self._finished == 1:  # takes longer than all others
                self._first_end = self.elapsed
            else:
                mean = self._seconds["step"]
                self._seconds["step"] += (_STEP_WEIGHT if mean else 1.0) * (seconds - mean)
            if self._limit is not None:
                progress = self._progress(step)
                self.steps = step if progress > 1 else max(step + 1, round((step + 1) / progress))
        elif activity is not None:
            self._seconds[activity] = seconds
            if activity == "validation":
                self._next_validation = self.elapsed + self._validation_interval
