"""Detects loss spikes: the loss of a run that diverges, not that of one noisy batch."""

from __future__ import annotations

import math
from collections import deque
from typing import Any

_WINDOW = 10  # losses


class SpikeDetector:
    """Watches the mean of the last 10 losses.

    Args:
        threshold: Nats by which the mean may exceed its lowest value; 0: only detect losses that are not finite.
        state: The `state` of an earlier detector.
    """

    def __init__(self, threshold: float, state: dict[str, Any] | None = None):
        state = state or {}
        self._threshold = threshold
        self._recent: deque[float] = deque(state.get("recent", ()), maxlen=_WINDOW)
        self._lowest: float = state.get("lowest") or math.inf

    def problem(self, loss: float, grad_norm: float) -> str | None:
        """Add the loss and the gradient's norm of a step. Returns what is wrong, if anything."""
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            return f"the loss is {loss} and the gradient's norm {grad_norm}"
        if loss == grad_norm == 0:  # a step without a token to learn, see `TrainStep`
            return None
        self._recent.append(loss)
        if len(self._recent) == _WINDOW:
            self._lowest = min(self._lowest, self._mean)
            if self._threshold and self._mean >= self._lowest + self._threshold:
                return f"the loss rose from {self._lowest:.2f} to {self._mean:.2f} (means of {_WINDOW} steps)"
        return None

    @property
    def healthy(self) -> bool:
        """Whether the loss is nearer to its lowest value than to a spike: a checkpoint saved now is a good one."""
        return len(self._recent) < _WINDOW or not self._threshold or self._mean < self._lowest + self._threshold / 2

    @property
    def state(self) -> dict[str, Any]:
        """The state, as JSON values."""
        return {"recent": list(self._recent), "lowest": self._lowest if math.isfinite(self._lowest) else None}

    @property
    def _mean(self) -> float:
        return sum(self._recent) / len(self._recent)
