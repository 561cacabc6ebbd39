"""`mlxlm generate --jsonl`: requests in, results out, one line each, as each finishes."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import click

from mlxlm.cache import KVOptions
from mlxlm.cli import render
from mlxlm.cli.job_progress import JobProgress, progress
from mlxlm.cli.line_reader import LineReader
from mlxlm.generation import GenerationOptions, LoadedModel, Request, run_batch
from mlxlm.generation.batching import BATCH_SIZE
from mlxlm.generation.jsonl.requests import MAX_LINE_BYTES, BadRequest, RequestReader, Sample
from mlxlm.generation.jsonl.results import ResultFile, bad_request_fields, has_failed, sample_fields
from mlxlm.utils.errors import GenerationError, MlxlmError, os_errors_as
from mlxlm.utils.files import json_line

# Seconds in which whoever writes many requests fills the pipe again, so that the first batch is a full one.
_GATHERING = 0.02

Write = Callable[[int, dict[str, Any]], None]  # the place of a result in the order of the requests, and its fields


def run(
    source: str,
    load: Callable[[], LoadedModel],
    conversations: Callable,
    options: GenerationOptions,
    kv: KVOptions,
    *,
    chat: bool,
    system_prompt: str | None,
    num_samples: int,
    batch_size: int | None,
    ordered: bool,
    resume: str | None,
    verbose: bool,
) -> None:
    """Serve every request of `source`, a file's path, or - for standard input. Raises GenerationError at the end if
    some failed.

    `conversations(loaded)`: what encodes the messages of a request. The others are what the command line asks for.
    """
    job_progress = JobProgress(num_samples)
    with _told(job_progress, resume, verbose), ExitStack() as stack:
        descriptor = stack.enter_context(_opened(source))
        file = None if resume is None else stack.enter_context(ResultFile(resume))
        lm = load()
        reader = RequestReader(
            lm,
            options,
            conversations(lm),
            kv=kv,
            num_samples=num_samples,
            as_chat=chat,
            system_prompt=system_prompt,
            **({"done": file.done} if file else {}),
        )
        job_progress.begin(_count_lines(descriptor))
        show = stack.enter_context(progress(job_progress))
        write = render.write_line if file is None else file.write
        lines = LineReader(descriptor, MAX_LINE_BYTES)
        server = _Server(lines, reader, _ordered(write) if ordered else _plain(write), job_progress, show)
        server.serve(lm, kv, batch_size or BATCH_SIZE)


@contextmanager
def _told(job_progress: JobProgress, resume: str | None, verbose: bool) -> Iterator[None]:
    """At the end the person is told what has come of it."""
    try:
        yield
    except MlxlmError:
        raise
    except BaseException:
        if resume is not None and job_progress.results:
            render.say(f"what is done is in {resume}; the same command goes on from there", style="dim")
        raise
    finally:
        if verbose and job_progress.seconds:
            render.say(job_progress.summary(), style="dim")
    if job_progress.failed:
        raise GenerationError(
            f"{job_progress.failed} of {job_progress.results} results failed; the reason is in their lines",
            "mend those requests, with a larger max_tokens or other stop strings where there is a complaint; "
            f"then the same with --resume {resume or 'FILE'}",
        )


class _Server:
    """Hands requests to the batch as they arrive, and results on as they finish."""

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
        self._tally = job_progress
        self._show = show
        self._running: dict[int, tuple[int, Sample]] = {}  # by their number in the batch
        self._places = 0

    def serve(self, lm: LoadedModel, kv: KVOptions, batch_size: int) -> None:
        """Serve to the end of the lines."""
        batch = run_batch(lm, self._requests(), kv=kv, batch_size=batch_size, on_progress=self._note_progress)
        with closing(batch):
            for number, result in batch:
                place, sample = self._running.pop(number)
                if not isinstance(result, MlxlmError):
                    self._tally.peak_memory = max(self._tally.peak_memory, result.timings.peak_memory_bytes)
                self._finish(place, sample_fields(sample, result, lm.tokenizer))

    def _note_progress(self, tokens: int) -> None:
        self._tally.tokens = tokens
        self._show()

    def _requests(self) -> Iterator[Request | None]:
        """The requests that have arrived; None where there is none just now and others are being worked on."""
        patience, number = 0.0, 0
        while True:
            if not self._running:
                taken, patience = self._lines.read_line(None), _GATHERING
            else:
                taken = self._lines.read_line(patience)
            if taken is not None:
                for sample in self._samples(*taken):
                    self._running[number] = self._place(), sample
                    number += 1
                    yield sample.request
            elif self._lines.ended:
                return
            else:
                patience = 0.0
                yield None

    def _samples(self, number: int, line: bytes) -> Iterator[Sample]:
        if not line.strip():
            self._tally.expect(0)
            return
        try:
            task = self._reader.read(number, line)
        except BadRequest as error:
            self._tally.expect(1)
            self._finish(self._place(), bad_request_fields(error))
            return
        self._tally.expect(task.num_samples)
        self._tally.skipped += task.num_samples - len(task.pending)
        yield from task.wanted()

    def _place(self) -> int:
        self._places += 1
        return self._places - 1

    def _finish(self, place: int, fields: dict[str, Any]) -> None:
        self._tally.results += 1
        self._tally.failed += has_failed(fields)
        self._write(place, fields)
        self._show()


def _plain(write: Callable[[bytes], None]) -> Write:
    return lambda place, fields: write(json_line(fields))


def _ordered(write: Callable[[bytes], None]) -> Write:
    """Holds every result back until all those before it are written."""
    held: dict[int, bytes] = {}
    following = 0

    def write_in_order(place: int, fields: dict[str, Any]) -> None:
        nonlocal following
        held[place] = json_line(fields)
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
