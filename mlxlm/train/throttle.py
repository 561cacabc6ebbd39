"""Rests and pauses of a run: on battery, when hot, or by a duty cycle. They don't change what is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mlxlm.backend import platform
from mlxlm.train.events import Paused, Resumed, Throttled
from mlxlm.utils.errors import ConfigError

POWER_ACTIONS = ("pause", "slow", "ignore")
SLOW_DUTY_CYCLE = 50.0  # percent
_CHECK_SECONDS = 10.0  # a charger or a fan takes longer to make a difference
_SLEEP_SECONDS = 0.1  # between two calls of `should_stop`


@dataclass(frozen=True)
class PowerPolicy:
    """What a run does on battery power and when the machine is hot.

    Attributes:
        on_battery: "pause", "slow" (a duty cycle of 50%, or of `duty_cycle` if that is less) or "ignore".
        on_heat: The same, while the machine is hot.
        duty_cycle: Percentage of the time that the run computes.

    Raises:
        ConfigError: Invalid values.
    """

    on_battery: str = "ignore"
    on_heat: str = "ignore"
    duty_cycle: float = 100.0

    def __post_init__(self) -> None:
        for name in ("on_battery", "on_heat"):
            if getattr(self, name) not in POWER_ACTIONS:
                raise ConfigError(f"{name} is {getattr(self, name)!r}", f"one of {', '.join(POWER_ACTIONS)}")
        duty_cycle = self.duty_cycle
        is_number = isinstance(duty_cycle, int | float) and not isinstance(duty_cycle, bool)
        if not is_number or not 1 <= duty_cycle <= 100:
            raise ConfigError(f"duty_cycle is {duty_cycle!r}, it must be a percentage", "from 1 to 100")


class Throttle:
    """Rests and pauses between the steps of a run.

    Args:
        power: When to rest and pause.
        on_battery: Whether the machine runs on battery; None if it has none. Called every 10 seconds.
        thermal_state: "cool", "warm" or "hot"; None if unknown. Called every 10 seconds.
        now: Clock, in seconds.
        sleep: Sleeps for some seconds.

    Attributes:
        paused: Total seconds of pauses.
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
        self._power, self._on_battery, self._thermal_state = power, on_battery, thermal_state
        self._now, self._sleep = now, sleep
        self._checked_at = -float("inf")
        self._working_since = now()
        self._reasons: dict[str, str] = {}  # by action: why it is needed now
        self._slow_since: tuple[str, float] | None = None  # reason and time
        self._hot = False

    def unsupported(self) -> list[str]:
        """Return a warning for each part of the policy that this machine can't follow."""
        warnings = []
        if self._power.on_battery != "ignore" and self._on_battery() is None:
            warnings.append(f"this machine has no battery: --on-battery {self._power.on_battery} has no effect")
        if self._power.on_heat != "ignore" and self._thermal_state() is None:
            warnings.append(f"this machine reports no temperatures: --on-heat {self._power.on_heat} has no effect")
        return warnings

    def between_steps(self, step: int, should_stop: Callable[[], bool]) -> Iterator[Paused | Throttled | Resumed]:
        """Wait after step `step` until the next one may begin, or until `should_stop` returns True.

        A pause begins when the caller continues after Paused, so that there is time to save.
        """
        self._check_machine()
        yield from self._slow_down(step)
        self._rest(should_stop)
        if reason := self._reasons.get("pause"):
            yield Paused(step, reason)
            seconds = self.wait(self._may_continue, should_stop)
            if not should_stop():
                yield Resumed(step, reason, seconds)
        self._working_since = self._now()

    def wait(self, is_over: Callable[[], bool], should_stop: Callable[[], bool]) -> float:
        """Pause until `is_over`, which is called every 10 seconds, or `should_stop` returns True.

        Returns:
            The seconds that have passed.
        """
        start, checked_at = self._now(), -float("inf")
        while not should_stop():
            if self._now() - checked_at >= _CHECK_SECONDS:
                checked_at = self._now()
                if is_over():
                    break
            self._sleep(_SLEEP_SECONDS)
        seconds = self._now() - start
        self.paused += seconds
        self._working_since = self._now()
        return seconds

    def _may_continue(self) -> bool:
        self._check_machine()
        return "pause" not in self._reasons

    def _slow_down(self, step: int) -> Iterator[Throttled | Resumed]:
        reason = self._reasons.get("slow")
        if self._slow_since and reason != self._slow_since[0]:
            before, since = self._slow_since
            self._slow_since = None
            yield Resumed(step, before, self._now() - since)
        if reason and not self._slow_since:
            self._slow_since = reason, self._now()
            yield Throttled(step, reason, self._duty_cycle())

    def _duty_cycle(self) -> float:
        return min(self._power.duty_cycle, SLOW_DUTY_CYCLE) if "slow" in self._reasons else self._power.duty_cycle

    def _rest(self, should_stop: Callable[[], bool]) -> None:
        start = self._now()
        end = start + (start - self._working_since) * (100 / self._duty_cycle() - 1)
        while (left := end - self._now()) > 0 and not should_stop():
            self._sleep(min(left, _SLEEP_SECONDS))

    def _check_machine(self) -> None:
        """Update `_reasons`, if the policy depends on the machine and the last check is old."""
        power = self._power
        if power.on_battery == power.on_heat == "ignore" or self._now() - self._checked_at < _CHECK_SECONDS:
            return
        self._checked_at = self._now()
        self._reasons = {}
        if power.on_heat != "ignore":
            # From hot until cool again: between the two it would start and stop all the time.
            thermal_state = self._thermal_state()
            self._hot = thermal_state == "hot" or self._hot and thermal_state == "warm"
            if self._hot:
                self._reasons[power.on_heat] = "the machine is hot"
        if power.on_battery != "ignore" and self._on_battery():
            self._reasons[power.on_battery] = "the machine runs on battery"


def make_throttle(power: PowerPolicy, peer_status: Callable[[str], list[Any]]) -> Throttle:
    """Return the throttle of a run: all ranks rest if one of their machines has to.

    Args:
        power: When to rest.
        peer_status: Returns what the other ranks report about "on_battery" and "thermal_state".
    """

    def on_battery() -> bool | None:
        known = [x for x in (platform.on_battery(), *peer_status("on_battery")) if x is not None]
        return any(known) if known else None

    def thermal_state() -> str | None:
        known = [platform.thermal_state(), *peer_status("thermal_state")]
        return next((state for state in ("hot", "warm", "cool") if state in known), None)

    return Throttle(power, on_battery=on_battery, thermal_state=thermal_state)
