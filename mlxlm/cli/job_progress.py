"""The progress of `generate --jsonl`, shown on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn

from mlxlm.cli import render
from mlxlm.utils.formatting import human_bytes, human_seconds

_SECONDS_BETWEEN_LINES = 60.0  # if stderr is not a terminal


class JobProgress:
    """Counts of results so far. `expected` is the total, None for a pipe; wrong lines may change it."""

    def __init__(self, num_samples: int):
        self.num_samples = num_samples
        self.expected: int | None = None
        self.results = self.failed = self.skipped = self.tokens = self.peak_memory = 0
        self._start: float | None = None

    def begin(self, lines: int | None) -> None:
        """Start the clock. `lines` is the number of requests, None if unknown."""
        self._start = time.monotonic()
        self.expected = None if lines is None else lines * self.num_samples

    def expect(self, rows: int) -> None:
        """Correct the total: a line has `rows` results."""
        if self.expected is not None:
            self.expected += rows - self.num_samples

    @property
    def done(self) -> int:
        """Results of this run and of earlier ones."""
        return self.results + self.skipped

    @property
    def seconds(self) -> float:
        """Seconds since `begin`; 0 before it."""
        return 0.0 if self._start is None else max(time.monotonic() - self._start, 1e-9)

    def summary(self) -> str:
        """The line at the end."""
        results = "1 result" if self.results == 1 else f"{self.results} results"
        failed = f", {self.failed} failed" if self.failed else ""
        skipped = f", {self.skipped} skipped" if self.skipped else ""
        return (
            f"{results}{failed}{skipped}; {self.tokens} tokens in {human_seconds(self.seconds)}, "
            f"{self.tokens / self.seconds:.1f} tokens/s; peak memory of MLX's arrays {human_bytes(self.peak_memory)}"
        )

    def line(self) -> str:
        """The line while the job runs."""
        of = f" of {self.expected}" if self.expected is not None else ""
        left = ""
        if self.expected and self.results:
            left = f", {human_seconds((self.expected - self.done) * self.seconds / self.results)} left"
        return f"{self.done}{of} done, {self.tokens / self.seconds:.0f} tokens/s{left}"


@contextmanager
def progress(job_progress: JobProgress) -> Iterator[Callable[[], None]]:
    """Show a progress bar if only stderr is a terminal; a line per minute if it isn't one."""
    if not sys.stderr.isatty():
        yield _print_lines(job_progress)
        return
    if sys.stdout.isatty():
        yield lambda: None
        return
    columns = BarColumn(), TextColumn("{task.description}", markup=False)
    with Progress(*columns, console=render.console, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda: bar.update(
            task, completed=job_progress.done, total=job_progress.expected, description=job_progress.line()
        )


def _print_lines(job_progress: JobProgress) -> Callable[[], None]:
    last = time.monotonic()

    def show() -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            render.say(job_progress.line(), style="dim")

    return show
