"""How long training takes, from the work and what a machine delivers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlxlm.plan.flops import Flops
from mlxlm.plan.machines import Machine
from mlxlm.utils.errors import ConfigError

# The share of its speed that training reaches where nobody says or has measured one: well-made runs report 0.43 to
# 0.52 of a GPU's peak (Narayanan et al. 2021, table 1) and 0.38 to 0.43 (Llama Team 2024, table 4).
ASSUMED_MFU = 0.4


@dataclass(frozen=True)
class Duration:
    """seconds for `tokens` on `num_devices` machines, each at `mfu` of its operations per second. known: where
    the utilisation comes from, "assumed", "given" or "measured" (by a probe)."""

    machine: Machine
    num_devices: int
    mfu: float
    mfu_source: str
    seconds_per_step: float
    steps: float
    tokens: float

    @property
    def seconds(self) -> float:
        return self.seconds_per_step * self.steps

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def seconds_for(flops: float, flops_per_second: float, mfu: float, num_devices: int = 1) -> float:
    """Raises ConfigError for machines that deliver nothing, or no number."""
    if not (0 < mfu <= 1 and num_devices >= 1 and 1 <= flops_per_second < math.inf):
        raise ConfigError(
            f"{num_devices} devices of {flops_per_second:g} FLOP/s, utilisation {mfu:g}, can't be planned with",
            "at least 1 device, a speed of at least 1, a utilisation above 0 and at most 1",
        )
    return flops / (flops_per_second * mfu * num_devices)


def estimate_duration(
    flops: Flops, tokens: float, machine: Machine, num_devices: int = 1, mfu: float | None = None
) -> Duration:
    """From the operations of a step and a machine's speed."""
    share = ASSUMED_MFU if mfu is None else mfu
    step = seconds_for(flops.per_step, machine.flops, share, num_devices)
    mfu_source = "assumed" if mfu is None else "given"
    return Duration(machine, num_devices, share, mfu_source, step, tokens / flops.tokens_per_step, tokens)


def measured_duration(flops: Flops, tokens: float, machine: Machine, seconds_per_step: float) -> Duration:
    """From the measured time of a step, which also says how much of the machine's speed training reaches: of the
    operations that are done, with scores of those keys only that attention computes here. A share above 1 says that
    the machine was slower when its speed was measured, having other work."""
    share = flops.computed_per_step / seconds_per_step / machine.flops
    return Duration(machine, 1, share, "measured", seconds_per_step, tokens / flops.tokens_per_step, tokens)
