"""Learning rates over a run: pure functions of the step."""

from __future__ import annotations

import math
from collections.abc import Callable

# The share of the way from the final to the peak rate that remains when a share `done` of the steps after the warmup
# is behind: 1 at the first of them.
_SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: 0.5 * (1 + math.cos(math.pi * done)),
    "linear": lambda done: 1 - done,
    "constant": lambda done: 1.0,
}
LR_SCHEDULES = (*_SHAPES, "wsd")


def learning_rate(
    step: int, steps: int, peak: float, *, lr_schedule: str, warmup: int, min_lr_ratio: float, decay_fraction: float
) -> float:
    """The learning rate of step `step` (0-based) of `steps`.

    First `warmup` steps up to `peak`, in equal parts. Then, down to `min_lr_ratio` · peak at the last step: "cosine"
    (Loshchilov & Hutter 2017), "linear", "wsd" (warmup, stable, decay: constant, then linear over the last
    `decay_fraction` of all steps, at least the very last; Hu et al. 2024, "MiniCPM", 4); or "constant", which stays at
    the peak.
    """
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    if lr_schedule == "wsd":
        begin = max(warmup, round(steps * (1 - decay_fraction)))
        remaining = min(1.0, (steps - 1 - step) / max(1, steps - 1 - begin))
    else:
        remaining = _SHAPES[lr_schedule](min(1.0, (step - warmup) / max(1, steps - 1 - warmup)))
    return peak * (min_lr_ratio + (1 - min_lr_ratio) * remaining)
