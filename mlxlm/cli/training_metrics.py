"""The metrics of a training run as text: a status that fits the terminal, and the loss curve as a line chart."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from mlxlm.report.curves import ExponentialMovingAverage, smoothing_span
from mlxlm.train import events
from mlxlm.utils.formatting import human_bytes, human_flops, human_seconds

_MAX_METRIC_LINES = 3
_BAR = 30  # columns

# Bits of the eight dots of a braille character, by column and row from the top (Unicode block U+2800).
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))


class TrainingMetrics:
    """Collects the metrics of a run from its events.

    Args:
        peak: FLOP/s that this machine reaches in matrix products; None if unknown.
        now: The clock, in seconds.
    """

    def __init__(self, peak: float | None = None, now: Callable[[], float] = time.monotonic):
        self._peak, self._now = peak, now
        self._step, self._steps, self._flops = 0, 0, 0
        self._last: events.Step | None = None
        self._loss, self._smooth = 0.0, ExponentialMovingAverage(1)
        self._best: events.Validation | None = None
        self._rest: tuple[str, float] | None = None  # why the run is paused or slowed, and since when
        self._unsaved = False

    def update(self, event: events.Event) -> None:
        """Take note of an event of the run."""
        if isinstance(event, events.Started):
            self._step, self._steps, self._flops = event.step, event.steps, event.flops_per_token
            self._smooth = ExponentialMovingAverage(smoothing_span(event.steps))
        elif isinstance(event, events.Step):
            self._last, self._step, self._steps = event, event.step, event.steps
            self._loss = self._smooth(event.metrics.get("reward", event.loss))
        elif isinstance(event, events.Validation) and event.best:
            self._best = event
        elif isinstance(event, events.Paused):
            self._rest = f"paused: {event.reason}", self._now()
        elif isinstance(event, events.Throttled):
            self._rest = f"training {event.duty_cycle:g}% of the time: {event.reason}", self._now()
        elif isinstance(event, events.Resumed):
            self._rest = None
        elif isinstance(event, events.CheckpointNotSaved | events.CheckpointSaved):
            self._unsaved = isinstance(event, events.CheckpointNotSaved)

    def metrics(self) -> list[str]:
        """The metrics, the most important first."""
        step = self._last
        if step is None:
            return ["compiling the first step"] if self._steps and not self._rest else []
        name = "reward" if "reward" in step.metrics else "loss"
        metrics = [f"{name} {self._loss:.3f}", f"{human_seconds(step.seconds_left)} left"]
        if step.tokens_per_second:
            metrics.append(f"{step.tokens_per_second:,.0f} tokens/s")
        if self._best:
            best = f"{self._best.loss:.3f}" if self._best.metrics else f"{self._best.bits_per_byte:.3f} bits/byte"
            if "reward" in self._best.metrics:
                best = f"{self._best.metrics['reward']:.3f}"
            metrics.append(f"best {best}")
        metrics += metric_texts({key: value for key, value in step.metrics.items() if key != name})
        metrics.append(human_bytes(step.memory))
        if step.tokens_per_second:
            rate = step.tokens_per_second * self._flops
            share = f" ({rate / self._peak:.0%})" if self._peak else ""
            metrics.append(f"{human_flops(rate)}{share}")
        return [*metrics, f"lr {step.learning_rate:.2g}", f"grad norm {step.grad_norm:.2g}"]

    def lines(self, width: int) -> list[str]:
        """The progress bar, the metrics that fit, and why the run is paused: lines of at most `width` columns."""
        if not self._steps:
            return []
        lines = [self._bar(width), *_packed(self.metrics(), width)[:_MAX_METRIC_LINES]]
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


def metric_texts(metrics: Mapping[str, float]) -> list[str]:
    """The metrics of a loss that have a value, each with its name."""
    return [f"{name} {value:.3g}" for name, value in metrics.items() if math.isfinite(value)]


def _packed(texts: list[str], width: int) -> list[str]:
    """Join texts into lines of at most `width` columns; a longer text is cut."""
    lines: list[str] = []
    for text in texts:
        if lines and len(lines[-1]) + 2 + len(text) <= width:
            lines[-1] += "  " + text
        else:
            lines.append(text if len(text) <= width else text[: width - 1] + "…")
    return lines


_CHART_HEIGHT = 10  # lines


def line_chart(points: Sequence[tuple[float, float]], width: int) -> list[str]:
    """Draw a line chart of braille characters, two by four dots each, with the range of y on the left.

    Each column of dots shows the mean of its points.

    Returns:
        The lines; [] without points.
    """
    width = max(1, width)
    if not points:
        return []
    columns: list[list[float]] = [[] for _ in range(2 * width)]
    x_low, x_high = points[0][0], max(points[-1][0], points[0][0] + 1e-9)
    for x, y in points:
        columns[min(2 * width - 1, int((x - x_low) / (x_high - x_low) * 2 * width))].append(y)
    means = [sum(c) / len(c) if c else None for c in columns]
    values = [m for m in means if m is not None]
    low, high = min(values), max(values)
    cells = [[0] * width for _ in range(_CHART_HEIGHT)]
    for column, mean in enumerate(means):
        if mean is None:
            continue
        level = 0.0 if high == low else (high - mean) / (high - low)
        row = min(4 * _CHART_HEIGHT - 1, int(level * 4 * _CHART_HEIGHT))
        cells[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
    labels = [f"{high:.2f}", *[""] * (_CHART_HEIGHT - 2), f"{low:.2f}"]
    pad = max(map(len, labels))
    return [
        f"{label:>{pad}} │" + "".join(chr(0x2800 + cell) for cell in row)
        for label, row in zip(labels, cells, strict=True)
    ]
