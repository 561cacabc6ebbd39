"""`mlxlm generate --jsonl`: requests in, results out, one line each, as each finishes."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from mlxlm.cli.lines import Lines
from mlxlm.cli.tally import Tally, progress, say
from mlxlm.errors import GenerationError, MlxlmError, os_errors_as

if TYPE_CHECKING:
    from mlxlm.cache import KVOptions
    from mlxlm.generation import GenerationOptions, LoadedModel, Request
    from mlxlm.generation.batch import Progress
    from mlxlm.generation.requests import RequestReader, Row

# Seconds in which whoever writes many requests fills the pipe again, so that the first batch is a full one.
_GATHERING = 0.02

Write = Callable[[int, dict[str, Any]], None]  # the place of a result in the order of the requests, and its fields


@dataclass(frozen=True)
class Job:
    """What the command line asks for; `source` is a file's path, or - for standard input."""

    source: str
    options: GenerationOptions
    kv: KVOptions
    chat: bool
    system: str | None
    samples: int
    batch_size: int
    ordered: bool
    resume: str | None
    verbose: bool


def run(job: Job, load: Callable[[], LoadedModel], conversations: Callable) -> None:
    """Serve every request of `job.source`. Raises GenerationError at the end if some failed.

    `conversations(loaded)`: what encodes the messages of a request.
    """
    tally = Tally(job.samples)
    try:
        _serve(job, load, conversations, tally)
    except MlxlmError:
        raise
    except BaseException:
        if job.resume is not None and tally.results:
            say(f"what is done is in {job.resume}; the same command goes on from there")
        raise
    finally:
        if job.verbose and tally.seconds:
            say(tally.summary())
    if tally.failed:
        raise GenerationError(
            f"{tally.failed} of {tally.results} results failed; the reason is in their lines",
            "mend those requests, with a larger max_tokens where there is a complaint; "
            f"then the same with --resume {job.resume or 'FILE'}",
        )


def _serve(job: Job, load: Callable[[], LoadedModel], conversations: Callable, tally: Tally) -> None:
    from mlxlm.generation.requests import LONGEST_LINE, RequestReader
    from mlxlm.generation.result_lines import ResultFile

    with ExitStack() as stack:
        descriptor = stack.enter_context(_opened(job.source))
        file = None if job.resume is None else stack.enter_context(ResultFile(job.resume))
        loaded = load()
        reader = RequestReader(
            loaded,
            job.options,
            conversations(loaded),
            kv=job.kv,
            samples=job.samples,
            as_messages=job.chat,
            system=job.system,
            **({"done": file.done} if file else {}),
        )
        tally.begin(_count_lines(descriptor))
        show = stack.enter_context(progress(tally))
        write = write_line if file is None else file.write
        lines = Lines(descriptor, LONGEST_LINE)
        server = _Server(lines, reader, _ordered(write) if job.ordered else _plain(write), tally, show)
        server.serve(loaded, job)


class _Server:
    """Hands requests to the batch as they arrive, and results on as they finish."""

    def __init__(self, lines: Lines, reader: RequestReader, write: Write, tally: Tally, show: Callable[[], None]):
        self._lines = lines
        self._reader = reader
        self._write = write
        self._tally = tally
        self._show = show
        self._running: dict[int, tuple[int, Row]] = {}  # by their number in the batch
        self._places = 0

    def serve(self, loaded: LoadedModel, job: Job) -> None:
        """Serve to the end of the lines."""
        from mlxlm.generation import run_batch
        from mlxlm.generation.result_lines import row_fields

        batch = run_batch(
            loaded, self._requests(), kv=job.kv, batch_size=job.batch_size, on_progress=self._note_progress
        )
        with closing(batch):
            for number, result in batch:
                place, row = self._running.pop(number)
                if not isinstance(result, MlxlmError):
                    self._tally.peak_memory = max(self._tally.peak_memory, result.timings.peak_memory_bytes)
                self._finish(place, row_fields(row, result, loaded.tokenizer))

    def _note_progress(self, progress: Progress) -> None:
        self._tally.tokens = progress.tokens
        self._show()

    def _requests(self) -> Iterator[Request | None]:
        """The requests that have arrived; None where there is none just now and others are being worked on."""
        patience, number = 0.0, 0
        while True:
            if not self._running:
                taken, patience = self._lines.take(None), _GATHERING
            else:
                taken = self._lines.take(patience)
            if taken is not None:
                for row in self._rows(*taken):
                    self._running[number] = self._place(), row
                    number += 1
                    yield row.request
            elif self._lines.ended:
                return
            else:
                patience = 0.0
                yield None

    def _rows(self, number: int, line: bytes) -> Iterator[Row]:
        from mlxlm.generation.requests import BadRequest
        from mlxlm.generation.result_lines import bad_request_fields

        if not line.strip():
            self._tally.expect(0)
            return
        try:
            task = self._reader.read(number, line)
        except BadRequest as error:
            self._tally.expect(1)
            self._finish(self._place(), bad_request_fields(error))
            return
        self._tally.expect(task.samples)
        self._tally.skipped += task.samples - len(task.todo)
        yield from task.rows()

    def _place(self) -> int:
        self._places += 1
        return self._places - 1

    def _finish(self, place: int, fields: dict[str, Any]) -> None:
        from mlxlm.generation.result_lines import has_failed

        self._tally.results += 1
        self._tally.failed += has_failed(fields)
        self._write(place, fields)
        self._show()


def write_line(line: bytes) -> None:
    """A line to standard output, in UTF-8 whatever the locale, at once."""
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _plain(write: Callable[[bytes], None]) -> Write:
    from mlxlm.generation.result_lines import line_of

    return lambda place, fields: write(line_of(fields))


def _ordered(write: Callable[[bytes], None]) -> Write:
    """Holds every result back until all those before it are written."""
    from mlxlm.generation.result_lines import line_of

    held: dict[int, bytes] = {}
    following = 0

    def write_in_order(place: int, fields: dict[str, Any]) -> None:
        nonlocal following
        held[place] = line_of(fields)
        while following in held:
            write(held.pop(following))
            following += 1

    return write_in_order


@contextmanager
def _opened(source: str) -> Iterator[int]:
    """The descriptor of a file or pipe to read from."""
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
    """The lines of a file from where it stands; None for a pipe."""
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return None
    at, count, last = os.lseek(descriptor, 0, os.SEEK_CUR), 0, b"\n"
    while block := os.pread(descriptor, 2**20, at):
        at += len(block)
        count += block.count(b"\n")
        last = block[-1:]
    return count + (last != b"\n")
