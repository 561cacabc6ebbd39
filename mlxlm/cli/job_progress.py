"""Counts of `generate --jsonl`, and how they are shown while it runs: on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn

from mlxlm.cli import render
from mlxlm.utils.formatting import human_bytes, human_seconds

_SAY_EVERY = 60.0  # seconds between progress lines where stderr is not a terminal


class JobProgress:
    """Counts of a run so far. `expected` results in all, as far as is known yet; None for a pipe."""

    def __init__(self, num_samples: int):
        self.num_samples = num_samples
        self.expected: int | None = None
        self.results = self.failed = self.skipped = self.tokens = self.peak_memory = 0
        self._began: float | None = None

    def begin(self, lines: int | None) -> None:
        """The clock runs from here; so many lines are to come."""
        self._began = time.monotonic()
        self.expected = None if lines is None else lines * self.num_samples

    def expect(self, rows: int) -> None:
        """A line turned out to have so many results."""
        if self.expected is not None:
            self.expected += rows - self.num_samples

    @property
    def done(self) -> int:
        return self.results + self.skipped

    @property
    def seconds(self) -> float:
        """Since `begin`; 0 before it."""
        return 0.0 if self._began is None else max(time.monotonic() - self._began, 1e-9)

    def summary(self) -> str:
        results = "1 result" if self.results == 1 else f"{self.results} results"
        failed = f", {self.failed} of them failed" if self.failed else ""
        skipped = f", {self.skipped} were done before" if self.skipped else ""
        return (
            f"{results}{failed}{skipped}; {self.tokens} tokens in {human_seconds(self.seconds)}, "
            f"{self.tokens / self.seconds:.1f} tokens/s; peak {human_bytes(self.peak_memory)}"
        )

    def line(self) -> str:
        of = f" of {self.expected}" if self.expected is not None else ""
        left = ""
        if self.expected and self.results:
            left = f", {human_seconds((self.expected - self.done) * self.seconds / self.results)} left"
        return f"{self.done}{of} done, {self.tokens / self.seconds:.0f} tokens/s{left}"


@contextmanager
def progress(job_progress: JobProgress) -> Iterator[Callable[[], None]]:
    """A bar, if the terminal of stderr isn't that of the results, too; where there is none, a line a minute."""
    if not sys.stderr.isatty():
        yield _rare_lines(job_progress)
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


def _rare_lines(job_progress: JobProgress) -> Callable[[], None]:
    said = time.monotonic()

    def show() -> None:
        nonlocal said
        if time.monotonic() - said >= _SAY_EVERY:
            said = time.monotonic()
            render.say(job_progress.line(), style="dim")

    return show
