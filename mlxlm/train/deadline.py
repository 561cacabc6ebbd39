"""How many steps a run has: as many as its settings say, or as many as its time has room for."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import Any

from mlxlm.train.settings import TrainSettings

_LOOKS = 50  # how often in a run, evenly, the steps that are left are reckoned anew; towards the end more often
_MEMORY = 0.1  # of the time: what was longer ago counts little for the speed of steps
_WORTH_A_CHANGE = 0.01  # of the steps that are left
_PICTURES = 2.0  # seconds for loss.png and report.html after the last step, before they have been drawn once
VALIDATION_FRACTION = 0.05  # of the time, at most, goes into validations and the checkpoints of the best of them
_MOST_VALIDATIONS = 20


def num_validations(limit: float, cost: float) -> int:
    """How many validations of `cost` seconds a run of `limit` seconds has, with the one after its last step."""
    return max(1, min(_MOST_VALIDATIONS, int(VALIDATION_FRACTION * limit / cost) if cost else _MOST_VALIDATIONS))


class Deadline:
    """`steps`: the run's, of which those of a run with a time limit change as it goes.

    The time that counts is that by the clock on the wall, in which the run works, validates, saves and rests between
    steps; pauses, and the time between an interruption and a resume, don't count. What steps, validations, samples
    and checkpoints take is measured; before there is a measurement it is what the `forecast` says (the log's).
    `state` is what an earlier one's `state` gave: a resumed run goes on with its plan. The time counts from `start_time` on
    (by `now`; None: from here on).

    Where `settings.eval_every` is None, validations are spread evenly over the time, see `num_validations`. With
    `settings.repeat_plan` the clock has no say: steps and validations are those of the run that is repeated.
    """

    def __init__(
        self,
        settings: TrainSettings,
        state: Mapping[str, Any],
        forecast: Mapping[str, Any] | None = None,
        now: Callable[[], float] = time.monotonic,
        start_time: float | None = None,
    ):
        self.steps: int = state.get("steps", settings.steps)
        self._limit, self._now, self._last = settings.time_limit, now, now() if start_time is None else start_time
        self._elapsed: float = state.get("elapsed", 0.0)
        self._next_look = self._elapsed
        self._by_time = settings.eval_every is None
        self._save_seconds = 60 * settings.save_minutes
        self._every = {"check": settings.eval_every or 0, "sample": settings.sample_every, "save": settings.save_every}
        repeat_plan = settings.repeat_plan or {"steps_changed": [], "validations": []}
        self._replanned, self._validations = dict(repeat_plan["steps_changed"]), frozenset(repeat_plan["validations"])
        drawn = min(_PICTURES, _MEMORY * self._limit) if self._limit else 0.0
        self._cost = {"check": 0.0, "sample": 0.0, "save": 0.0, "pictures": drawn}  # seconds of each
        self.plot_time_known = self._limit is None
        self._sum = self._count = 0.0  # of steps: both fade
        self._compiled = False
        if forecast:
            steps = forecast["steps"]
            self._cost["check"] = (forecast["seconds"] - forecast["step_seconds"]) / forecast["validations"]
            self._sum, self._count = forecast["step_seconds"] / steps, 1.0
        # A checkpoint whose validation is still owed, as that of a model to be tuned, has none.
        self._next_check: float = state.get("next_check", 0.0) if state else self._interval

    @property
    def state(self) -> dict[str, Any]:
        """`elapsed`: seconds, see above. `next_check`: of these, when to validate where that goes by the time."""
        return {"steps": self.steps, "elapsed": self.elapsed, "next_check": self._next_check}

    @property
    def _interval(self) -> float:
        """Seconds from one validation to the next, where a time is set."""
        cost = self._cost["check"] + self._cost["save"]
        return self._limit / num_validations(self._limit, cost) if self._limit else 0.0

    @property
    def elapsed(self) -> float:
        return self._elapsed + self._now() - self._last

    @property
    def recorded_elapsed(self) -> float:
        """`elapsed`, as it was when `record_time` was last called."""
        return self._elapsed

    @property
    def seconds_left(self) -> float | None:
        """None where no time was set."""
        return None if self._limit is None else max(0.0, self._limit - self.elapsed)

    def should_validate(self, done: int) -> bool:
        """Whether a validation is due after step `done`."""
        if done == self.steps or done in self._validations:
            return True
        if self._by_time:
            return self._limit is not None and self.elapsed >= self._next_check
        return self._every["check"] > 0 and done % self._every["check"] == 0

    def exclude_pause(self, seconds: float) -> None:
        """The last `seconds` were a pause."""
        self._last += seconds

    def record_time(self, what: str | None) -> None:
        """The time since this was called before went into `what`: "step", with what belongs to each, "check" (a
        validation, with its sample), "sample", "save" or "pictures"; None for what happens once."""
        now = self._now()
        seconds, self._last = now - self._last, now
        self._elapsed += seconds
        if what == "step" and self._compiled:
            kept = math.exp(-seconds / (_MEMORY * self._limit)) if self._limit else 0.0
            self._sum, self._count = self._sum * kept + seconds, self._count * kept + 1
        elif what == "step":
            self._compiled = True  # the first step takes longer than all others
        elif what is not None:
            self._cost[what] = seconds
            if what == "check":
                self._next_check = self._elapsed + self._interval
            self.plot_time_known = self.plot_time_known or what == "pictures"

    def steps_changed(self, done: int) -> bool:
        """Whether, after step `done`, the run has another number of `steps` than before; it may end here."""
        if done in self._replanned:
            self.steps = self._replanned[done]
            return True
        if self._limit is None or not self._count or self._elapsed < self._next_look and done < self.steps:
            return False
        left = self._limit - self._elapsed
        self._next_look = self._elapsed + max(0.0, min(self._limit / _LOOKS, 0.1 * left, 0.2 * self._elapsed))
        steps = done + self._fitting(done, left)
        # At the end some more steps must be worth another validation.
        least = _WORTH_A_CHANGE * (done if done == self.steps else self.steps - done)
        if abs(steps - self.steps) < max(1.0, least):
            return False
        self.steps = steps
        return True

    def _fitting(self, done: int, left: float) -> int:
        """How many more steps there is time for, with all that happens between them and at the end."""
        each = self._sum / self._count

        def takes(more: int) -> float:
            times = {
                name: (done + more - 1) // every - done // every if every else 0 for name, every in self._every.items()
            }
            if self._by_time:
                times["check"] = int(more * each / self._interval)
            times["save"] = max(times["save"], times["check"])  # each validation may be the best one, which is saved
            every = self._every["save"]
            if self._save_seconds and not 0 < every * each <= self._save_seconds:  # then some are due by time
                times["save"] += int(more * each / self._save_seconds)
            return more * each + sum(n * self._cost[name] for name, n in times.items()) + sum(self._cost.values())

        return max(0, bisect_right(range(int(max(0.0, left) / each) + 2), left, key=takes) - 1)
