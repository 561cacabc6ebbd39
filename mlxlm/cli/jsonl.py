"""`mlxlm generate --jsonl`: reads requests and writes results, one JSON object per line, as they finish."""

from __future__ import annotations

import itertools
import os
import select
import stat
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import Any

import click
from rich.progress import BarColumn, Progress, TextColumn

from mlxlm.cache import KVOptions
from mlxlm.cli import render
from mlxlm.cli.generation_options import given_options
from mlxlm.cli.options import given_values
from mlxlm.generation import Engine, GenerationOptions, LoadedModel, Request, run_batch
from mlxlm.generation.jsonl import (
    MAX_LINE_BYTES,
    BadRequest,
    EncodedPrompt,
    Messages,
    PromptEncoder,
    RequestReader,
    Sample,
)
from mlxlm.generation.jsonl_results import ResultFile, bad_request_fields, has_failed, sample_fields
from mlxlm.utils.errors import GenerationError, MlxlmError, os_errors_as
from mlxlm.utils.formatting import human_bytes, human_seconds
from mlxlm.utils.json_files import json_line

# Seconds to wait for more requests, so that a program that writes many fills the first batch.
_GATHER_SECONDS = 0.02
_SECONDS_BETWEEN_LINES = 60.0  # if stderr is not a terminal
_BLOCK = 2**18  # bytes that are read at once


def run(
    source: str,
    load: Callable[[], LoadedModel],
    make_encoder: Callable[[LoadedModel], Callable[[Messages], EncodedPrompt]],
    options: GenerationOptions,
    kv: KVOptions,
    flags: Mapping[str, Any],
) -> None:
    """Serve every request of a file.

    Args:
        source: The path of the requests, or - for standard input.
        load: Loads the model.
        make_encoder: Returns the function that encodes the messages of a request, for a model.
        options: The options of all requests.
        kv: The key-value cache.
        flags: Further options of the command, by name.

    Raises:
        GenerationError: At the end, if some requests failed.
    """
    resume, num_samples = flags["resume"], flags["num_samples"]
    with ExitStack() as stack:
        descriptor = stack.enter_context(_open(source))
        file = None if resume is None else stack.enter_context(ResultFile(resume))
        lm = load()
        encoder = PromptEncoder(lm, make_encoder(lm), as_chat=flags["chat"], system_prompt=flags["system_prompt"])
        defaults = lm.generation_options(**given_options(options))
        done = {"done": file.done} if file else {}
        reader = RequestReader(lm, defaults, encoder, kv=kv, num_samples=num_samples, **done)
        engine = Engine(lm, kv=kv, **given_values({"batch_size": flags["batch_size"]}))
        job_progress = JobProgress(num_samples, _count_lines(descriptor))
        write = render.write_line if file is None else file.write
        try:
            with progress(job_progress) as show:
                lines = LineReader(descriptor, MAX_LINE_BYTES)
                _Server(lines, reader, write, flags["ordered"], job_progress, show).serve(engine)
        except MlxlmError:
            raise
        except BaseException:
            if resume is not None and job_progress.results:
                render.say(f"finished results are in {resume}; the same command continues from there", style="dim")
            raise
        finally:
            if flags["verbose"]:
                render.say(job_progress.summary(), style="dim")
    if job_progress.failed:
        raise GenerationError(
            f"{job_progress.failed} of {job_progress.results} results failed; the reason is in their lines",
            "fix those requests (a larger max_tokens or other stop strings for a constraint_error), then run the same "
            f"command with --resume {resume or 'FILE'}",
        )


@dataclass
class _Server:
    """Passes requests to the batch as they arrive, and writes results as they finish, or in the order of requests."""

    lines: LineReader
    reader: RequestReader
    write: Callable[[bytes], None]
    ordered: bool
    progress: JobProgress
    show: Callable[[], None]

    def __post_init__(self) -> None:
        self._running: dict[int, tuple[int, Sample]] = {}  # (position, sample) by number in the batch
        self._positions = itertools.count()  # of results, in the order of requests
        self._waiting: dict[int, bytes] = {}  # results by position, until all those before them are written
        self._next = 0  # the position to write

    def serve(self, engine: Engine) -> None:
        """Serve all requests, to the end of the input."""
        with closing(run_batch(engine, self._requests(), self._note_tokens)) as batch:
            for number, result in batch:
                position, sample = self._running.pop(number)
                if not isinstance(result, MlxlmError):
                    self.progress.peak_memory = max(self.progress.peak_memory, result.timings.peak_memory_bytes)
                self._finish(position, sample_fields(sample, result, engine.lm.tokenizer))

    def _note_tokens(self, tokens: int) -> None:
        self.progress.tokens = tokens
        self.show()

    def _requests(self) -> Iterator[Request | None]:
        """The requests that have arrived; None if there is none at the moment while others are running."""
        timeout, number = 0.0, itertools.count()
        while True:
            is_idle = not self._running
            line = self.lines.read_line(None if is_idle else timeout)
            if line is not None:
                timeout = _GATHER_SECONDS if is_idle else timeout
                for sample in self._samples(*line):
                    self._running[next(number)] = next(self._positions), sample
                    yield sample.request
            elif self.lines.ended:
                return
            else:
                timeout = 0.0
                yield None

    def _samples(self, number: int, line: bytes) -> Iterator[Sample]:
        if not line.strip():
            self.progress.expect(0)
            return
        try:
            task = self.reader.read(number, line)
        except BadRequest as error:
            self.progress.expect(1)
            self._finish(next(self._positions), bad_request_fields(error))
            return
        self.progress.expect(task.num_samples)
        self.progress.skipped += task.num_samples - len(task.pending)
        yield from task.pending_samples()

    def _finish(self, position: int, fields: dict[str, Any]) -> None:
        self.progress.results += 1
        self.progress.failed += has_failed(fields)
        if self.ordered:
            self._waiting[position] = json_line(fields)
            while self._next in self._waiting:
                self.write(self._waiting.pop(self._next))
                self._next += 1
        else:
            self.write(json_line(fields))
        self.show()


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
    """Counts of results so far. `expected` is the total, None for a pipe; wrong lines may change it.

    Args:
        num_samples: Results of a request, by default.
        lines: The number of requests; None if unknown.
    """

    def __init__(self, num_samples: int, lines: int | None):
        self.num_samples = num_samples
        self.expected = None if lines is None else lines * num_samples
        self.results = self.failed = self.skipped = self.tokens = self.peak_memory = 0
        self._start = time.monotonic()

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
        """Seconds since the beginning."""
        return max(time.monotonic() - self._start, 1e-9)

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
        last = time.monotonic()

        def show() -> None:
            nonlocal last
            if time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                render.say(job_progress.line(), style="dim")

        yield show
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
