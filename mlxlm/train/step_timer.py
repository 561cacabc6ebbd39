"""How fast training goes."""

from __future__ import annotations

import time
from collections import deque


class StepTimer:
    """Seconds spent in steps; the first step, which compiles, is kept apart from the rates.

    Use it as a context around each step.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._steps = 0
        self._recent: deque[float] = deque(maxlen=50)

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        now = time.perf_counter()
        self.seconds += now - self._start
        self._steps += 1
        if self._steps == 1:
            self._compiled = now
        else:
            self._recent.append(now - self._start)

    def rate(self, tokens: int) -> float:
        """Tokens per second over the last 50 steps of `tokens` each; 0 before the second step."""
        return tokens * len(self._recent) / sum(self._recent) if self._recent else 0.0

    def left(self, steps: int) -> float:
        """Seconds that `steps` more will take, with the validation, saving and rests that went between them."""
        if self._steps < 2:
            return self.seconds * steps
        return (time.perf_counter() - self._compiled) / (self._steps - 1) * steps

    def exclude_pause(self, seconds: float) -> None:
        """The last `seconds` were a pause, which says nothing about the time that is left."""
        if self._steps:
            self._compiled += seconds
