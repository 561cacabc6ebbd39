"""Rests and pauses of a run: on battery, when hot, or by a duty cycle. They don't change what is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mlxlm.backend import platform
from mlxlm.config.option import option, range_problems
from mlxlm.train.events import Paused, Resumed, Throttled
from mlxlm.utils.errors import ConfigError

_ACTIONS = ("pause", "slow", "ignore")
_SLOW_DUTY_CYCLE = 50.0  # percent
_CHECK_SECONDS = 10.0  # a charger or a fan takes longer to make a difference
_SLEEP_SECONDS = 0.1  # between two calls of `should_stop`


@dataclass(frozen=True)
class PowerPolicy:
    """What a run does on battery power and when the machine is hot.

    "pause" computes nothing, "slow" half of the time (or `duty_cycle` if that is less).

    Raises:
        ConfigError: Invalid values.
    """

    on_battery: str = option("ignore", "On battery power.", choices=_ACTIONS)
    on_heat: str = option("ignore", "While the machine is hot.", choices=_ACTIONS)
    duty_cycle: float = option(100.0, "Percentage of the time that the run computes.", low=1, high=100)

    def __post_init__(self) -> None:
        if problems := list(range_problems(self)):
            raise ConfigError("; ".join(problems))


class Throttle:
    """Rests and pauses between the steps of a run.

    Args:
        power: When to rest and pause.

    Attributes:
        paused: Total seconds of pauses.
    """

    def __init__(self, power: PowerPolicy):
        self.paused = 0.0
        self._power = power
        self._checked_at, self._working_since = -float("inf"), time.monotonic()
        self._reasons: dict[str, str] = {}  # by action: why it is needed now
        self._slow_since: tuple[str, float] | None = None  # reason and time
        self._hot = False

    def unsupported(self) -> list[str]:
        """Return a warning for each part of the policy that this machine can't follow."""
        warnings = []
        if self._power.on_battery != "ignore" and platform.on_battery() is None:
            warnings.append(f"this machine has no battery: `on_battery={self._power.on_battery}` has no effect")
        if self._power.on_heat != "ignore" and platform.thermal_state() is None:
            warnings.append(f"this machine reports no temperatures: `on_heat={self._power.on_heat}` has no effect")
        return warnings

    def between_steps(self, step: int, should_stop: Callable[[], bool]) -> Iterator[Paused | Throttled | Resumed]:
        """Wait after step `step` until the next one may begin, or until `should_stop` returns True.

        A pause begins when the caller continues after Paused, so that there is time to save.
        """
        self._check_machine()
        yield from self._slow_down(step)
        start = time.monotonic()
        end = start + (start - self._working_since) * (100 / self._duty_cycle() - 1)
        while (left := end - time.monotonic()) > 0 and not should_stop():
            time.sleep(min(left, _SLEEP_SECONDS))
        if reason := self._reasons.get("pause"):
            yield Paused(step, reason)
            seconds = self.wait(self._check_machine, should_stop)
            if not should_stop():
                yield Resumed(step, reason, seconds)
        self._working_since = time.monotonic()

    def wait(self, is_over: Callable[[], bool], should_stop: Callable[[], bool]) -> float:
        """Pause until `is_over`, which is called every 10 seconds, or `should_stop` returns True.

        Returns:
            The seconds that have passed.
        """
        start, checked_at = time.monotonic(), -float("inf")
        while not should_stop():
            if time.monotonic() - checked_at >= _CHECK_SECONDS:
                checked_at = time.monotonic()
                if is_over():
                    break
            time.sleep(_SLEEP_SECONDS)
        seconds = time.monotonic() - start
        self.paused += seconds
        return seconds

    def _slow_down(self, step: int) -> Iterator[Throttled | Resumed]:
        reason = self._reasons.get("slow")
        if self._slow_since and reason != self._slow_since[0]:
            before, since = self._slow_since
            self._slow_since = None
            yield Resumed(step, before, time.monotonic() - since)
        if reason and not self._slow_since:
            self._slow_since = reason, time.monotonic()
            yield Throttled(step, reason, self._duty_cycle())

    def _duty_cycle(self) -> float:
        return min(self._power.duty_cycle, _SLOW_DUTY_CYCLE) if "slow" in self._reasons else self._power.duty_cycle

    def _check_machine(self) -> bool:
        """Update `_reasons`, if the last check is old. Returns whether they allow work."""
        if time.monotonic() - self._checked_at >= _CHECK_SECONDS:
            self._checked_at, self._reasons = time.monotonic(), {}
            if self._power.on_heat != "ignore":
                # From hot until cool again: between the two it would start and stop all the time.
                thermal_state = platform.thermal_state()
                self._hot = thermal_state == "hot" or self._hot and thermal_state == "warm"
                if self._hot:
                    self._reasons[self._power.on_heat] = "the machine is hot"
            if self._power.on_battery != "ignore" and platform.on_battery():
                self._reasons[self._power.on_battery] = "the machine runs on battery"
        return "pause" not in self._reasons
