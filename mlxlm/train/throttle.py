"""When a run rests: on battery, in heat, or a share of the time. None of it changes what is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mlxlm.backend import platform
from mlxlm.train.events import Paused, Resumed, Throttled
from mlxlm.utils.errors import ConfigError

POWER_ACTIONS = ("pause", "slow", "ignore")
SLOW_DUTY_CYCLE = 50.0  # percent of the time that "slow" works
_LOOK_EVERY = 10.0  # seconds: a charger or a fan takes longer to make a difference
_SLICE = 0.1  # seconds between two questions whether to stop


@dataclass(frozen=True)
class PowerPolicy:
    """What a run does on battery power and in heat, each one of `POWER_ACTIONS`; `duty_cycle` is the percentage of the time that
    it works. "slow" works half of the time, or `duty_cycle` where that is less.

    Raises ConfigError for values that can't work.
    """

    on_battery: str = "ignore"
    on_heat: str = "ignore"
    duty_cycle: float = 100.0

    def __post_init__(self) -> None:
        for name in ("on_battery", "on_heat"):
            if getattr(self, name) not in POWER_ACTIONS:
                raise ConfigError(f"{name} is {getattr(self, name)!r}", f"one of {', '.join(POWER_ACTIONS)}")
        if (
            isinstance(self.duty_cycle, bool)
            or not isinstance(self.duty_cycle, int | float)
            or not 1 <= self.duty_cycle <= 100
        ):
            raise ConfigError(f"duty is {self.duty_cycle!r}, it is a percentage", "from 1 to 100")


class Throttle:
    """Rests and pauses between the steps of a run, by `power`.

    `on_battery` and `thermal_state` are asked for the machine's state every 10 seconds, `now` and `sleep` are its clock.
    `paused` counts seconds.
    """

    def __init__(
        self,
        power: PowerPolicy,
        *,
        on_battery: Callable[[], bool | None] = platform.on_battery,
        thermal_state: Callable[[], str | None] = platform.thermal_state,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ):
        self.paused = 0.0
        self._power, self._on_battery, self._heat, self._now, self._sleep = power, on_battery, thermal_state, now, sleep
        self._looked = -float("inf")
        self._worked_since = now()
        self._reasons: dict[str, str] = {}  # what is asked for now: the reason for "pause", the one for "slow"
        self._slow_since: tuple[str, float] | None = None
        self._hot = False

    def unsupported(self) -> list[str]:
        """What was asked for and can't be known on this machine, a sentence each."""
        found = []
        if self._power.on_battery != "ignore" and self._on_battery() is None:
            found.append(f"this machine has no battery: on battery {self._power.on_battery} has no effect")
        if self._power.on_heat != "ignore" and self._heat() is None:
            found.append(f"this machine shows no temperatures: on heat {self._power.on_heat} has no effect")
        return found

    def between_steps(self, step: int, should_stop: Callable[[], bool]) -> Iterator[Paused | Throttled | Resumed]:
        """Called after step `step`: return when the next one may begin, or as soon as a stop is asked for.

        The pause begins when the caller goes on after Paused, so that there is time to save.
        """
        self._look()
        yield from self._slow(step)
        self._rest(should_stop)
        if reason := self._reasons.get("pause"):
            yield Paused(step, reason)
            seconds = self.wait(self._over, should_stop)
            if not should_stop():
                yield Resumed(step, reason, seconds)
        self._worked_since = self._now()

    def wait(self, over: Callable[[], bool], should_stop: Callable[[], bool]) -> float:
        """Pause until `over()`, which is asked every 10 seconds, or until a stop is asked for; returns the seconds."""
        start, asked = self._now(), -float("inf")
        while not should_stop():
            if self._now() - asked >= _LOOK_EVERY:
                asked = self._now()
                if over():
                    break
            self._sleep(_SLICE)
        seconds = self._now() - start
        self.paused += seconds
        self._worked_since = self._now()
        return seconds

    def _over(self) -> bool:
        self._look()
        return "pause" not in self._reasons

    def _slow(self, step: int) -> Iterator[Throttled | Resumed]:
        reason = self._reasons.get("slow")
        if self._slow_since and reason != self._slow_since[0]:
            before, since = self._slow_since
            self._slow_since = None
            yield Resumed(step, before, self._now() - since)
        if reason and not self._slow_since:
            self._slow_since = reason, self._now()
            yield Throttled(step, reason, self._duty())

    def _duty(self) -> float:
        return min(self._power.duty_cycle, SLOW_DUTY_CYCLE) if "slow" in self._reasons else self._power.duty_cycle

    def _rest(self, should_stop: Callable[[], bool]) -> None:
        start = self._now()
        end = start + (start - self._worked_since) * (100 / self._duty() - 1)
        while (left := end - self._now()) > 0 and not should_stop():
            self._sleep(min(left, _SLICE))

    def _look(self) -> None:
        """Ask what the machine's state is, where that matters and the last answer is old."""
        power = self._power
        if power.on_battery == power.on_heat == "ignore" or self._now() - self._looked < _LOOK_EVERY:
            return
        self._looked = self._now()
        self._reasons = {}
        if power.on_heat != "ignore":
            # From hot until cool again: between the two it would start and stop all the time.
            thermal_state = self._heat()
            self._hot = thermal_state == "hot" or self._hot and thermal_state == "warm"
            if self._hot:
                self._reasons[power.on_heat] = "the machine is hot"
        if power.on_battery != "ignore" and self._on_battery():
            self._reasons[power.on_battery] = "the machine runs on battery"
