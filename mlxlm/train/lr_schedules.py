"""Learning rate schedules: pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

# The remaining fraction of the way from the final to the peak rate, by the fraction of steps after the warmup.
_DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
}
LR_SCHEDULES = (*_DECAYS, "wsd")


def learning_rate(
    step: int, steps: int, peak: float, lr_schedule: str, warmup: int, min_lr_ratio: float, decay_fraction: float
) -> float:
    """Return the learning rate of step `step` (0-based) of `steps`.

    It rises linearly to `peak` in `warmup` steps, then falls to `min_lr_ratio` · peak at the last step.

    Args:
        step: The step.
        steps: Number of steps.
        peak: Peak learning rate.
        lr_schedule: "cosine" (Loshchilov & Hutter 2017); "linear"; "wsd" (warmup, stable, decay: constant, then linear
            over the last `decay_fraction` of all steps, at least the very last; Hu et al. 2024, "MiniCPM", 4); or
            "constant", which stays at the peak.
        warmup: Warmup steps.
        min_lr_ratio: Final learning rate, as a fraction of the peak.
        decay_fraction: See "wsd".
    """
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if lr_schedule == "wsd":
        decay_start = max(warmup, round(steps * (1 - decay_fraction)))
        remaining = min(1.0, (steps - 1 - step) / max(1, steps - 1 - decay_start))
    else:
        remaining = _DECAYS[lr_schedule](min(1.0, (step - warmup) / max(1, steps - 1 - warmup)))
    return peak * (min_lr_ratio + (1 - min_lr_ratio) * remaining)
