"""`mlxlm generate --jsonl`: reads requests and writes results, one JSON object per line, as they finish."""

from __future__ import annotations

import os
import select
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import click
from rich.progress import BarColumn, Progress, TextColumn

from mlxlm.cache import KVOptions
from mlxlm.cli import render
from mlxlm.cli.generation_options import given_options
from mlxlm.generation import Engine, GenerationOptions, LoadedModel, Request, run_batch
from mlxlm.generation.engine import BATCH_SIZE
from mlxlm.generation.jsonl import (
    MAX_LINE_BYTES,
    BadRequest,
    EncodedPrompt,
    Messages,
    PromptEncoder,
    RequestReader,
    ResultFile,
    Sample,
    bad_request_fields,
    has_failed,
    sample_fields,
)
from mlxlm.utils.errors import GenerationError, MlxlmError, os_errors_as
from mlxlm.utils.formatting import human_bytes, human_seconds
from mlxlm.utils.json_files import json_line

# Seconds to wait for more requests, so that a program that writes many fills the first batch.
_GATHER_SECONDS = 0.02
_SECONDS_BETWEEN_LINES = 60.0  # if stderr is not a terminal
_BLOCK = 2**18  # bytes that are read at once

Write = Callable[[int, dict[str, Any]], None]  # gets the position of a result in the order of requests, and its fields


@dataclass(frozen=True)
class JsonlSettings:
    """What the command line sets for all requests. Fields are named as the options."""

    options: GenerationOptions
    kv: KVOptions
    chat: bool = False
    system_prompt: str | None = None
    num_samples: int = 1
    batch_size: int | None = None
    ordered: bool = False
    resume: str | None = None
    verbose: bool = False


def run(
    source: str,
    load: Callable[[], LoadedModel],
    make_encoder: Callable[[LoadedModel], Callable[[Messages], EncodedPrompt]],
    settings: JsonlSettings,
) -> None:
    """Serve every request of a file.

    Args:
        source: The path of the requests, or - for standard input.
        load: Loads the model.
        make_encoder: Returns the function that encodes the messages of a request, for a model.
        settings: Options of the command line.

    Raises:
        GenerationError: At the end, if some requests failed.
    """
    job_progress = JobProgress(settings.num_samples)
    with _summary(job_progress, settings), ExitStack() as stack:
        descriptor = stack.enter_context(_open(source))
        file = None if settings.resume is None else stack.enter_context(ResultFile(settings.resume))
        lm = load()
        reader = RequestReader(
            lm,
            lm.generation_options(**given_options(settings.options)),
            PromptEncoder(lm, make_encoder(lm), as_chat=settings.chat, system_prompt=settings.system_prompt),
            kv=settings.kv,
            num_samples=settings.num_samples,
            **({"done": file.done} if file else {}),
        )
        job_progress.begin(_count_lines(descriptor))
        show = stack.enter_context(progress(job_progress))
        write_line = render.write_line if file is None else file.write
        write = _write_in_order(write_line) if settings.ordered else _write_as_finished(write_line)
        server = _Server(LineReader(descriptor, MAX_LINE_BYTES), reader, write, job_progress, show)
        server.serve(Engine(lm, kv=settings.kv, batch_size=settings.batch_size or BATCH_SIZE))


@contextmanager
def _summary(job_progress: JobProgress, settings: JsonlSettings) -> Iterator[None]:
    """At the end, print a summary, how to resume, or raise GenerationError for failed requests."""
    resume = settings.resume
    try:
        yield
    except MlxlmError:
        raise
    except BaseException:
        if resume is not None and job_progress.results:
            render.say(f"finished results are in {resume}; the same command continues from there", style="dim")
        raise
    finally:
        if settings.verbose and job_progress.seconds:
            render.say(job_progress.summary(), style="dim")
    if job_progress.failed:
        raise GenerationError(
            f"{job_progress.failed} of {job_progress.results} results failed; the reason is in their lines",
            "fix those requests (a larger max_tokens or other stop strings for a constraint_error), then run the same "
            f"command with --resume {resume or 'FILE'}",
        )


class _Server:
    """Passes requests to the batch as they arrive, and writes results as they finish."""

    def __init__(
        self,
        lines: LineReader,
        reader: RequestReader,
        write: Write,
        job_progress: JobProgress,
        show: Callable[[], None],
    ):
        self._lines = lines
        self._reader = reader
        self._write = write
        self._progress = job_progress
        self._show = show
        self._running: dict[int, tuple[int, Sample]] = {}  # (position, sample) by number in the batch
        self._num_positions = 0

    def serve(self, engine: Engine) -> None:
        """Serve all requests, to the end of the input."""
        with closing(run_batch(engine, self._requests(), self._note_progress)) as batch:
            for number, result in batch:
                position, sample = self._running.pop(number)
                if not isinstance(result, MlxlmError):
                    self._progress.peak_memory = max(self._progress.peak_memory, result.timings.peak_memory_bytes)
                self._finish(position, sample_fields(sample, result, engine.lm.tokenizer))

    def _note_progress(self, tokens: int) -> None:
        self._progress.tokens = tokens
        self._show()

    def _requests(self) -> Iterator[Request | None]:
        """The requests that have arrived; None if there is none at the moment while others are running."""
        timeout, number = 0.0, 0
        while True:
            if not self._running:
                line, timeout = self._lines.read_line(None), _GATHER_SECONDS
            else:
                line = self._lines.read_line(timeout)
            if line is not None:
                for sample in self._samples(*line):
                    self._running[number] = self._next_position(), sample
                    number += 1
                    yield sample.request
            elif self._lines.ended:
                return
            else:
                timeout = 0.0
                yield None

    def _samples(self, number: int, line: bytes) -> Iterator[Sample]:
        if not line.strip():
            self._progress.expect(0)
            return
        try:
            task = self._reader.read(number, line)
        except BadRequest as error:
            self._progress.expect(1)
            self._finish(self._next_position(), bad_request_fields(error))
            return
        self._progress.expect(task.num_samples)
        self._progress.skipped += task.num_samples - len(task.pending)
        yield from task.pending_samples()

    def _next_position(self) -> int:
        self._num_positions += 1
        return self._num_positions - 1

    def _finish(self, position: int, fields: dict[str, Any]) -> None:
        self._progress.results += 1
        self._progress.failed += has_failed(fields)
        self._write(position, fields)
        self._show()


def _write_as_finished(write: Callable[[bytes], None]) -> Write:
    return lambda position, fields: write(json_line(fields))


def _write_in_order(write: Callable[[bytes], None]) -> Write:
    """Hold every result back until all those before it are written."""
    waiting: dict[int, bytes] = {}
    next_position = 0

    def write_in_order(position: int, fields: dict[str, Any]) -> None:
        nonlocal next_position
        waiting[position] = json_line(fields)
        while next_position in waiting:
            write(waiting.pop(next_position))
            next_position += 1

    return write_in_order


@contextmanager
def _open(source: str) -> Iterator[int]:
    """The file descriptor of a file or pipe."""
    if source == "-":
        if sys.stdin is None:
            raise click.UsageError("standard input is closed (try: --jsonl FILE)")
        yield sys.stdin.fileno()
        return
    with os_errors_as(GenerationError, "read", source):
        descriptor = os.open(source, os.O_RDONLY)
    try:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise GenerationError(f"{source} is a folder", "a file with one request per line")
        yield descriptor
    finally:
        os.close(descriptor)


def _count_lines(descriptor: int) -> int | None:
    """The number of lines from the current position of a file; None for a pipe."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return None
    at, count, last = os.lseek(descriptor, 0, os.SEEK_CUR), 0, b"\n"
    while block := os.pread(descriptor, 2**20, at):
        at += len(block)
        count += block.count(b"\n")
        last = block[-1:]
    return count + (last != b"\n")


class LineReader:
    """The lines of an open file, pipe or terminal, read one by one with a timeout and without a thread.

    Python's own readers block until they have a whole block of bytes.

    Args:
        descriptor: The file descriptor.
        max_bytes: A longer line is cut to `max_bytes + 1` bytes, so that memory is bounded.
    """

    def __init__(self, descriptor: int, max_bytes: int):
        self._descriptor = descriptor
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._searched = 0
        self._number = 0
        self.ended = False

    def read_line(self, seconds: float | None) -> tuple[int, bytes] | None:
        """Read the next line. The last one needs no line end.

        Args:
            seconds: How long to wait for it; None waits without a limit.

        Returns:
            (number from 1, bytes without the line end), or None if no line has come. At the end of the input `ended`
            is True.
        """
        while (end := self._buffer.find(b"\n", self._searched)) < 0 and not self.ended:
            self._searched = len(self._buffer)
            if not select.select([self._descriptor], [], [], seconds)[0]:
                return None
            block = os.read(self._descriptor, _BLOCK)
            self.ended = not block
            self._append(block)
        if end < 0 and not self._buffer:
            return None
        line = bytes(self._buffer if end < 0 else self._buffer[:end])
        del self._buffer[: len(line) + 1]
        self._searched = 0
        self._number += 1
        return self._number, line[: self._max_bytes + 1]

    def _append(self, block: bytes) -> None:
        """Add a block to the buffer, which has no line end; of a line that is too long keep only the beginning."""
        if len(self._buffer) > self._max_bytes:
            block = block[block.index(b"\n") :] if b"\n" in block else b""
        self._buffer += block


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
