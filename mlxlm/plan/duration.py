"""Training time, from the operations and the machine's speed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlxlm.plan.flops import Flops
from mlxlm.plan.machines import Machine
from mlxlm.utils.errors import ConfigError

# Model FLOPs utilization, if it is neither given nor measured. Well-made runs report 0.43 to 0.52 of a GPU's peak
# (Narayanan et al. 2021, table 1) and 0.38 to 0.43 (Llama Team 2024, table 4).
ASSUMED_MFU = 0.4


@dataclass(frozen=True)
class Duration:
    """The time of a training run.

    Attributes:
        machine: Of one device.
        num_devices: Devices that train together.
        mfu: Model FLOPs utilization, the share of the machine's speed that training reaches.
        mfu_source: "assumed", "given" or "measured" (by a probe).
        seconds_per_step: Of an optimizer step.
        steps: Optimizer steps.
        tokens: Tokens to train on.
    """

    machine: Machine
    num_devices: int
    mfu: float
    mfu_source: str
    seconds_per_step: float
    steps: float
    tokens: float

    @property
    def seconds(self) -> float:
        """Seconds of the run."""
        return self.seconds_per_step * self.steps

    @property
    def tokens_per_second(self) -> float:
        """Training throughput."""
        return self.tokens / self.seconds


def seconds_for(flops: float, flops_per_second: float, mfu: float, num_devices: int = 1) -> float:
    """Return the seconds that `flops` operations take.

    Raises:
        ConfigError: The speed, the utilization or the number of devices is out of range.
    """
    if not (0 < mfu <= 1 and num_devices >= 1 and 1 <= flops_per_second < math.inf):
        raise ConfigError(
            f"can't plan with {num_devices} devices of {flops_per_second:g} FLOP/s at a utilization (mfu) of {mfu:g}",
            "at least 1 device, at least 1 FLOP/s, a utilization above 0 and at most 1",
        )
    return flops / (flops_per_second * mfu * num_devices)


def estimate_duration(
    flops: Flops, tokens: float, machine: Machine, num_devices: int = 1, mfu: float | None = None
) -> Duration:
    """Estimate the training time from the operations of a step and the machine's speed."""
    mfu, mfu_source = (ASSUMED_MFU, "assumed") if mfu is None else (mfu, "given")
    step = seconds_for(flops.per_step, machine.flops, mfu, num_devices)
    return Duration(machine, num_devices, mfu, mfu_source, step, tokens / flops.tokens_per_step, tokens)


def measured_duration(flops: Flops, tokens: float, machine: Machine, seconds_per_step: float) -> Duration:
    """Return the training time at a measured time per step.

    The utilization counts only the attention scores that are computed on this machine. A utilization above 1 means
    that the machine was busy when its speed was measured.
    """
    mfu = flops.computed_per_step / seconds_per_step / machine.flops
    return Duration(machine, 1, mfu, "measured", seconds_per_step, tokens / flops.tokens_per_step, tokens)
