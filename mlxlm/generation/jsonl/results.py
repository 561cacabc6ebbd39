"""Results as lines of JSON, and the file of them that a later run continues."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import signal
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from mlxlm.backend.error_text import describe_error
from mlxlm.generation.jsonl.requests import BadRequest, Id, Sample
from mlxlm.generation.logprobs import TokenLogprob, TokenLogprobs
from mlxlm.generation.result import GenerationResult
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import GenerationError, MlxlmError, os_errors_as
from mlxlm.utils.files import atomic_write
from mlxlm.utils.json_files import parse_json_object

_BEGINNING = b'{"id": '  # of every line here


def result_fields(result: GenerationResult, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a line of results tells of a text: nothing that differs between two equal runs."""
    told = {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "tokens": len(result.tokens),
        "prompt_tokens": result.prompt_tokens,
        "seed": result.seed,
    }
    if result.logprobs is not None:
        told["logprobs"] = [_logprob_fields(token, tokenizer) for token in result.logprobs]
    if result.constraint_error is not None:
        told["constraint_error"] = result.constraint_error
    return told


def full_result_fields(result: GenerationResult, tokenizer: Tokenizer) -> dict[str, Any]:
    """All that is known of a text, as values of JSON: also how fast it came."""
    told = result_fields(result, tokenizer)
    told |= {"cached_tokens": result.cached_tokens, "timings": asdict(result.timings)}
    if result.speculation is not None:
        told["speculation"] = asdict(result.speculation)
    return told


def sample_fields(sample: Sample, result: GenerationResult | MlxlmError, tokenizer: Tokenizer) -> dict[str, Any]:
    """The result of a sample, with the id of its request, where it asks for several the number of the sample, and the
    request's digest."""
    number = {"sample": sample.number} if sample.num_samples > 1 else {}
    head = {"id": sample.id} | number | {"request": sample.digest}
    if isinstance(result, MlxlmError):
        return head | {"line": sample.line, "error": describe_error(result)}
    return head | result_fields(result, tokenizer)


def _logprob_fields(drawn: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    def fields(entry: TokenLogprob | TokenLogprobs) -> dict[str, Any]:
        text = tokenizer.token_bytes(entry.token) if entry.bytes is None else entry.bytes
        return {
            "token": entry.token,
            "text": text.decode("utf-8", "replace"),
            "bytes": None if entry.bytes is None else list(entry.bytes),
            # float32 has no more digits; JSON has no infinity, which is a token that the model rules out.
            "logprob": round(entry.logprob, 6) if math.isfinite(entry.logprob) else None,
        }

    return fields(drawn) | (
        {"top_logprobs": [fields(entry) for entry in drawn.top_logprobs]} if drawn.top_logprobs else {}
    )


def bad_request_fields(error: BadRequest) -> dict[str, Any]:
    """The result of a line that is no request that can be served."""
    return {"id": error.id, "line": error.line, "error": describe_error(error)}


def has_failed(fields: dict[str, Any]) -> bool:
    """Whether a result is none: an error, or a constrained text that is not complete. A later run tries it again."""
    return "error" in fields or "constraint_error" in fields


class ResultFile:
    """A file of results, whole after a crash at any instant but for its last line, which the next run mends.

    Opening reads what is there and changes nothing. With the first new line, results that failed are dropped, since
    they are tried again, and so is a last line that was never finished. New lines are written behind what is done.
    """

    def __init__(self, path: Path | str):
        """Raises GenerationError for a file that isn't one of results, that another process is writing, or that
        the disk refuses. A file that isn't there is made."""
        self._path = Path(path).resolve()
        self._descriptors: list[int] = []
        self._done: dict[tuple[str, int], str] = {}
        try:
            with os_errors_as(GenerationError, "write", path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._new = not self._path.exists()
                self._open()
                with self._path.open("rb") as file:
                    self._lines: list[tuple[int, int, bool]] | None = list(self._read(file))
        except BaseException:
            self.close()
            raise

    def done(self, id: Id, sample: int) -> str | None:
        """The digest of the request whose result for this sample the file had when it was opened; None for none."""
        return self._done.get((str(id), sample))

    def write(self, line: bytes) -> None:
        """Append a line. Raises GenerationError if the disk refuses; the file then ends with the line before."""
        rest = memoryview(line)
        with os_errors_as(GenerationError, "write", self._path), _signals_held():
            if self._lines is not None:
                self._size = self._mend(self._lines)
                self._lines = None
            try:
                while rest:
                    rest = rest[os.write(self._descriptors[-1], rest) :]
            except OSError:
                os.ftruncate(self._descriptors[-1], self._size)
                raise
            self._size += len(line)

    def close(self) -> None:
        """Close the file, and remove it if it is new and nothing was written."""
        if self._descriptors and self._new and os.fstat(self._descriptors[-1]).st_size == 0:
            self._path.unlink(missing_ok=True)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o666)
        self._descriptors.append(descriptor)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise GenerationError(f"{self._path} is not a regular file", "the name of a new file")
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise GenerationError(f"another process is writing {self._path}", "one process a file") from None
            # Some network drives have no locks.

    def _mend(self, lines: list[tuple[int, int, bool]]) -> int:
        """Drop what failed and what was torn; return the size of what stays."""
        kept = [(start, end) for start, end, stays in lines if stays]
        size = sum(end - start for start, end in kept)
        if len(kept) < len(lines):
            with self._path.open("rb") as file:
                self._replace(file, kept)
        elif size < os.fstat(self._descriptors[-1]).st_size:
            os.ftruncate(self._descriptors[-1], size)
        if size and os.pread(self._descriptors[-1], 1, size - 1) != b"\n":
            size += os.write(self._descriptors[-1], b"\n")
        return size

    def _read(self, file: BinaryIO) -> Iterator[tuple[int, int, bool]]:
        """(start, end, whether it stays) of every line but a torn last one."""
        start = 0
        for number, line in enumerate(file, 1):
            fields = self._parsed(line)
            if fields is not None:
                stays = not has_failed(fields)
                if stays:
                    self._done[str(fields["id"]), fields.get("sample", 0)] = fields["request"]
                yield start, start + len(line), stays
            elif line.endswith(b"\n") or not _is_torn(line):
                raise GenerationError(
                    f"line {number} of {self._path} is not a result, and the file stays as it is",
                    "the name of a new file, or of one that this command wrote",
                )
            start += len(line)

    @staticmethod
    def _parsed(line: bytes) -> dict[str, Any] | None:
        with suppress(GenerationError):
            value = parse_json_object(line, "the line", GenerationError, "a result")
            if "id" in value and ("error" in value or _is_text(value)):
                return value
        return None

    def _replace(self, file: BinaryIO, kept: list[tuple[int, int]]) -> None:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        with atomic_write(self._path, GenerationError) as copy:
            os.fchmod(copy.fileno(), mode)
            for start, end in kept:
                file.seek(start)
                copy.write(file.read(end - start))
        self._open()  # the first descriptor keeps its lock, so that who waits for that file finds it taken


def _is_text(value: dict[str, Any]) -> bool:
    return "text" in value and isinstance(value.get("request"), str) and type(value.get("sample", 0)) is int


def _is_torn(line: bytes) -> bool:
    """Whether these bytes, behind the last line end, are of a line that was never finished. After a power cut they can
    be zeros."""
    return line[: len(_BEGINNING)] == _BEGINNING[: len(line)] or not line.strip(b"\0")


@contextmanager
def _signals_held() -> Iterator[None]:
    """Nothing is raised in here by the handlers of SIGINT and SIGTERM; they are called afterwards.

    Blocking the signals in this thread would not do: another thread takes them then, and the handler still runs here.
    """
    if threading.current_thread() is not threading.main_thread():  # in which alone handlers run
        yield
        return
    held: list[int] = []
    numbers = [n for n in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(n))]
    before = {}
    try:
        for number in numbers:
            before[number] = signal.signal(number, lambda number, _: held.append(number))
        yield
    finally:
        for number in reversed(before):  # SIGINT's last: what it raises, raises after everything is put back
            signal.signal(number, before[number])
        for number in held:
            signal.raise_signal(number)
