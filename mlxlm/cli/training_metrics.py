"""What is shown of a run while it trains: figures out of its events, in as many columns as there are."""

from __future__ import annotations

import time
from collections.abc import Callable

from mlxlm.report.smoothing import ExponentialMovingAverage, smoothing_span
from mlxlm.train import (
    CheckpointNotSaved,
    CheckpointSaved,
    Event,
    Paused,
    Resumed,
    Started,
    Step,
    Throttled,
    Validation,
)
from mlxlm.utils.formatting import human_bytes, human_flops, human_seconds

_MOST_LINES = 3  # of figures, below the bar
_BAR = 30  # columns


class TrainingMetrics:
    """The state of a run as texts. `peak`: FLOP/s that this machine does at best, None where unknown."""

    def __init__(self, peak: float | None = None, now: Callable[[], float] = time.monotonic):
        self._peak, self._now = peak, now
        self._step, self._steps, self._flops = 0, 0, 0
        self._last: Step | None = None
        self._loss, self._smooth = 0.0, ExponentialMovingAverage(1)
        self._best: Validation | None = None
        self._rest: tuple[str, float] | None = None  # what the run waits for or is slowed by, and since when
        self._unsaved = False

    def update(self, event: Event) -> None:
        if isinstance(event, Started):
            self._step, self._steps, self._flops = event.step, event.steps, event.flops_per_token
            self._smooth = ExponentialMovingAverage(smoothing_span(event.steps))
        elif isinstance(event, Step):
            self._last, self._step, self._steps = event, event.step, event.steps
            self._loss = self._smooth(event.loss)
        elif isinstance(event, Validation) and event.best:
            self._best = event
        elif isinstance(event, Paused):
            self._rest = f"paused: {event.reason}", self._now()
        elif isinstance(event, Throttled):
            self._rest = f"working {event.duty_cycle:g}% of the time: {event.reason}", self._now()
        elif isinstance(event, Resumed):
            self._rest = None
        elif isinstance(event, CheckpointNotSaved | CheckpointSaved):
            self._unsaved = isinstance(event, CheckpointNotSaved)

    def metrics(self) -> list[str]:
        """The figures, the most important first."""
        step = self._last
        if step is None:
            return ["compiling the first step"] if self._steps and not self._rest else []
        found = [f"loss {self._loss:.3f}", f"{human_seconds(step.seconds_left)} left"]
        if step.tokens_per_second:
            found.append(f"{step.tokens_per_second:,.0f} tokens/s")
        if self._best:
            found.append(f"best {self._best.bits_per_byte:.3f} bits/byte")
        found.append(human_bytes(step.memory))
        if step.tokens_per_second:
            rate = step.tokens_per_second * self._flops
            share = f" ({rate / self._peak:.0%})" if self._peak else ""
            found.append(f"{human_flops(rate)}{share}")
        return [*found, f"rate {step.learning_rate:.2g}", f"gradient {step.grad_norm:.2g}"]

    def lines(self, width: int) -> list[str]:
        """The bar, the figures that fit, and what holds the run up: none longer than `width` columns."""
        if not self._steps:
            return []
        lines = [self._bar(width), *_packed(self.metrics(), width)[:_MOST_LINES]]
        if self._rest:
            text, since = self._rest
            lines += _packed([text, f"for {human_seconds(self._now() - since)}"], width)
        if self._unsaved:
            lines += _packed(["not saved: the disk is full"], width)
        return lines

    def _bar(self, width: int) -> str:
        share = self._step / self._steps
        left, right = f"step {self._step}/{self._steps} ", f" {share:.0%}"
        room = min(_BAR, width - len(left) - len(right))
        if room < 4:
            return f"{left.strip()}{right}"[:width]
        filled = round(share * room)
        return f"{left}{'━' * filled}{'┄' * (room - filled)}{right}"


def _packed(metrics: list[str], width: int) -> list[str]:
    """Facts side by side as long as a line has room; one that is longer than a line is cut."""
    lines: list[str] = []
    for fact in metrics:
        if lines and len(lines[-1]) + 2 + len(fact) <= width:
            lines[-1] += "  " + fact
        else:
            lines.append(fact if len(fact) <= width else fact[: width - 1] + "…")
    return lines
