"""How long training takes, from the work and what a machine delivers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlxlm.plan.flops import Flops
from mlxlm.plan.machines import Machine
from mlxlm.utils.errors import ConfigError

# The share of its speed that training reaches where nobody says or has measured one: well-made runs report 0.43 to
# 0.52 of a GPU's peak (Narayanan et al. 2021, table 1) and 0.38 to 0.43 (Llama Team 2024, table 4).
ASSUMED_UTILISATION = 0.4


@dataclass(frozen=True)
class Duration:
    """seconds for `tokens` on `devices` machines, each at `utilisation` of its operations per second. known: where
    the utilisation comes from, "assumed", "given" or "measured" (by a probe)."""

    machine: Machine
    devices: int
    utilisation: float
    known: str
    seconds_per_step: float
    steps: float
    tokens: float

    @property
    def seconds(self) -> float:
        return self.seconds_per_step * self.steps

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def seconds_for(flops: float, flops_per_second: float, utilisation: float, devices: int = 1) -> float:
    """Raises ConfigError for machines that deliver nothing, or no number."""
    if not (0 < utilisation <= 1 and devices >= 1 and 1 <= flops_per_second < math.inf):
        raise ConfigError(
            f"{devices} devices of {flops_per_second:g} FLOP/s, utilisation {utilisation:g}, can't be planned with",
            "at least 1 device, a speed of at least 1, a utilisation above 0 and at most 1",
        )
    return flops / (flops_per_second * utilisation * devices)


def duration_of(
    flops: Flops, tokens: float, machine: Machine, devices: int = 1, utilisation: float | None = None
) -> Duration:
    """From the operations of a step and a machine's speed."""
    share = ASSUMED_UTILISATION if utilisation is None else utilisation
    step = seconds_for(flops.per_step, machine.flops, share, devices)
    known = "assumed" if utilisation is None else "given"
    return Duration(machine, devices, share, known, step, tokens / flops.tokens_per_step, tokens)


def measured_duration(flops: Flops, tokens: float, machine: Machine, seconds_per_step: float) -> Duration:
    """From the measured time of a step, which also says how much of the machine's speed training reaches: of the
    operations that are done, with scores of those keys only that attention computes here. A share above 1 says that
    the machine was slower when its speed was measured, having other work."""
    share = flops.done_per_step / seconds_per_step / machine.flops
    return Duration(machine, 1, share, "measured", seconds_per_step, tokens / flops.tokens_per_step, tokens)
