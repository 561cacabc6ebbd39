"""Detects loss spikes: the loss of a run that diverges, not that of one noisy batch."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import Any

_WINDOW, _RECENT, _TOO_MANY = 100, 20, 15  # losses


class SpikeDetector:
    """Finds 15 of the last 20 losses above a limit: the lowest median of 100 losses so far, and a margin.

    The margin is `threshold`, or twice the distance from the median of these 100 losses to their 90th percentile if
    that is more: with a batch size of 1, losses differ by more than a nat. (The median absolute deviation is too small
    where most losses are near 0 and a third is not.) Before 100 losses the limit is `threshold` above the loss of a
    uniform distribution, or above the first loss if that is higher.

    Args:
        threshold: Nats; 0: only detect losses that are not finite.
        uniform_loss: Loss of a uniform distribution over the vocabulary, in nats.
        state: The `state` of an earlier detector.
    """

    def __init__(self, threshold: float, uniform_loss: float, state: dict[str, Any] | None = None):
        state = state or {}
        self._threshold, self._uniform_loss = threshold, uniform_loss
        self._losses: deque[float] = deque(state.get("losses", ()), maxlen=_WINDOW)
        self._limit: float | None = state.get("limit")

    def problem(self, loss: float, grad_norm: float) -> str | None:
        """Add the loss and the gradient's norm of a step. Returns what is wrong, if anything."""
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            return f"the loss is {loss} and the gradient's norm {grad_norm}"
        if loss == grad_norm == 0:  # a step without a token to learn, see `TrainStep`
            return None
        self._losses.append(loss)
        if self._limit is None:
            self._limit = max(loss, self._uniform_loss) + self._threshold
        if self._threshold and (count := self._count_above(self._limit)) >= _TOO_MANY:
            return f"the loss rose to {loss:.2f}: {count} of the last {_RECENT} steps are above {self._limit:.2f}"
        if len(self._losses) == _WINDOW:
            middle, high = median(self._losses), sorted(self._losses)[int(0.9 * _WINDOW)]
            self._limit = min(self._limit, middle + max(self._threshold, 2 * (high - middle)))
        return None

    @property
    def healthy(self) -> bool:
        """Whether most losses are clearly below the limit: a checkpoint saved now is a good one."""
        if self._limit is None or not self._threshold:
            return True
        return self._count_above(self._limit - self._threshold / 2) < _RECENT / 2

    @property
    def state(self) -> dict[str, Any]:
        """The state, as JSON values."""
        return {"losses": list(self._losses), "limit": self._limit}

    def _count_above(self, limit: float) -> int:
        return sum(loss > limit for loss in list(self._losses)[-_RECENT:])
