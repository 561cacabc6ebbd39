"""The speed of training steps."""

from __future__ import annotations

import time
from collections import deque


class StepTimer:
    """Measures steps; use it as a context around each of them. The first one, which compiles, counts for no rate.

    Args:
        previous: Seconds that the steps before a resume took.

    Attributes:
        seconds: Total time of all steps, `previous` included.
    """

    def __init__(self, previous: float = 0.0) -> None:
        self.seconds = previous
        self._num_steps = 0
        self._recent: deque[float] = deque(maxlen=50)

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        now = time.perf_counter()
        seconds = now - self._start
        self.seconds += seconds
        self._num_steps += 1
        if self._num_steps == 1:
            self._first_seconds, self._first_end = seconds, now
        else:
            self._recent.append(seconds)

    def rate(self, tokens: int) -> float:
        """Return tokens per second over the last 50 steps of `tokens` each; 0 before the second step."""
        return tokens * len(self._recent) / sum(self._recent) if self._recent else 0.0

    def seconds_left(self, steps: int) -> float:
        """Return the time that `steps` more will take, with the validation, saving and rests between them."""
        if self._num_steps < 2:
            return self._first_seconds * steps
        return (time.perf_counter() - self._first_end) / (self._num_steps - 1) * steps

    def exclude_pause(self, seconds: float) -> None:
        """Don't count the last `seconds`, a pause, in `seconds_left`."""
        if self._num_steps:
            self._first_end += seconds
