"""Learning rate schedules: pure functions of the share of a run that is over."""

from __future__ import annotations

import math
from collections.abc import Callable

# The remaining fraction of the way from the final to the peak rate, by the fraction of the time after the warmup.
_DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "constant": lambda progress: 1.0,
}
LR_SCHEDULES = (*_DECAYS, "wsd")


def learning_rate(
    progress: float, peak: float, lr_schedule: str, warmup: float, min_lr_ratio: float, decay_fraction: float
) -> float:
    """Return the learning rate of a step.

    It rises linearly to `peak`, then falls to `min_lr_ratio` · peak at the end.

    Args:
        progress: Share of the run that is over after the step, above 0 and at most 1: of its steps or of its time.
        peak: Peak learning rate.
        lr_schedule: "cosine" (Loshchilov & Hutter 2017); "linear"; "wsd" (warmup, stable, decay: constant, then linear
            over the last `decay_fraction` of the run; Hu et al. 2024, "MiniCPM", 4); or "constant", which stays at the
            peak.
        warmup: Share of the run at which the rate reaches the peak.
        min_lr_ratio: Final learning rate, as a fraction of the peak.
        decay_fraction: See "wsd".
    """
    if progress < warmup:
        return peak * progress / warmup
    if lr_schedule == "wsd":
        remaining = min(1.0, (1 - progress) / max(1e-9, min(decay_fraction, 1 - warmup)))
    else:
        remaining = _DECAYS[lr_schedule]((progress - warmup) / (1 - warmup or 1.0))
    return peak * (min_lr_ratio + (1 - min_lr_ratio) * remaining)
