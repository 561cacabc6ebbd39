"""Tells a run that has gone wrong from one noisy batch."""

from __future__ import annotations

import math
from collections import deque


class SpikeDetector:
    """Watches the mean of the last 10 losses: it may exceed its lowest value by less than `spike_threshold` nats.

    `spike_threshold` 0 looks for losses that are not finite only. `state` is what an earlier guard's `state` gave.
    """

    def __init__(self, spike_threshold: float, state: dict | None = None):
        state = state or {}
        self._spike = spike_threshold
        self._recent: deque[float] = deque(state.get("recent", ()), maxlen=10)
        self._lowest: float = state.get("lowest") or math.inf

    def problem(self, loss: float, norm: float) -> str | None:
        """Take the loss and the gradient's norm of a step; say what is wrong, if anything."""
        if not math.isfinite(loss) or not math.isfinite(norm):
            return f"the loss is {loss} and the gradient's norm {norm}"
        if loss == norm == 0:  # of a step that had no token to learn, see `TrainStep`
            return None
        self._recent.append(loss)
        if len(self._recent) == 10:
            self._lowest = min(self._lowest, self._mean)
            if self._spike and self._mean >= self._lowest + self._spike:
                return f"the loss rose from {self._lowest:.2f} to {self._mean:.2f} (means of 10 steps)"
        return None

    @property
    def healthy(self) -> bool:
        """Whether the loss is nearer to its lowest value than to a spike: what is saved now is good."""
        return len(self._recent) < 10 or not self._spike or self._mean < self._lowest + self._spike / 2

    @property
    def state(self) -> dict:
        return {"recent": list(self._recent), "lowest": self._lowest if math.isfinite(self._lowest) else None}

    @property
    def _mean(self) -> float:
        return sum(self._recent) / len(self._recent)
