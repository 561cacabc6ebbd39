"""JSONL: results as lines of JSON, and the file of them."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from mlxlm.backend.error_text import describe_error
from mlxlm.generation.jsonl import BadRequest, Id, Sample
from mlxlm.generation.result import GenerationResult, TokenLogprob, TokenLogprobs
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import GenerationError, MlxlmError, os_errors_as
from mlxlm.utils.files import atomic_write
from mlxlm.utils.json_files import parse_json_object

_LINE_START = b'{"id": '  # of all of them


def result_fields(result: GenerationResult, tokenizer: Tokenizer) -> dict[str, Any]:
    """The fields of a result that are equal in two equal runs."""
    values: dict[str, Any] = {
        "text": result.text,
        "finish_reason": result.finish_reason,
        "tokens": len(result.tokens),
        "prompt_tokens": result.prompt_tokens,
        "seed": result.seed,
    }
    if result.logprobs is not None:
        values["logprobs"] = [_logprobs_fields(token, tokenizer) for token in result.logprobs]
    if result.constraint_error is not None:
        values["constraint_error"] = result.constraint_error
    return values


def full_result_fields(result: GenerationResult, tokenizer: Tokenizer) -> dict[str, Any]:
    """All fields of a result, timings included."""
    values = result_fields(result, tokenizer)
    values |= {"cached_tokens": result.cached_tokens, "timings": asdict(result.timings)}
    if result.speculation is not None:
        values["speculation"] = asdict(result.speculation)
    return values


def sample_fields(sample: Sample, result: GenerationResult | MlxlmError, tokenizer: Tokenizer) -> dict[str, Any]:
    """The line of a sample: id, number (if there are several), digest of the request, and the result or its error."""
    task = sample.task
    number = {"sample": sample.number} if task.num_samples > 1 else {}
    head = {"id": task.id} | number | {"request": task.digest}
    if isinstance(result, MlxlmError):
        return head | {"line": task.line, "error": describe_error(result)}
    return head | result_fields(result, tokenizer)


def bad_request_fields(error: BadRequest) -> dict[str, Any]:
    """The line for a request that can't be served."""
    return {"id": error.id, "line": error.line, "error": describe_error(error)}


def has_failed(fields: dict[str, Any]) -> bool:
    """Whether a line is an error or an incomplete constrained text, which a later run tries again."""
    return "error" in fields or "constraint_error" in fields


def _logprobs_fields(logprobs: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    values = _logprob_fields(logprobs, tokenizer)
    if logprobs.top_logprobs:
        values["top_logprobs"] = [_logprob_fields(entry, tokenizer) for entry in logprobs.top_logprobs]
    return values


def _logprob_fields(entry: TokenLogprob | TokenLogprobs, tokenizer: Tokenizer) -> dict[str, Any]:
    content = tokenizer.token_bytes(entry.token) if entry.bytes is None else entry.bytes
    return {
        "token": entry.token,
        "text": content.decode("utf-8", "replace"),
        "bytes": None if entry.bytes is None else list(entry.bytes),
        # float32 has no more digits. JSON has no infinity: None is a token that the model rules out.
        "logprob": round(entry.logprob, 6) if math.isfinite(entry.logprob) else None,
    }


class ResultFile:
    """A file of result lines that stays readable after a crash.

    Opening only reads. The first `write` removes failed results, which are tried again, and a torn last line, which a
    crash, a full disk or a power cut can leave, by replacing the file. New lines are appended.
    """

    def __init__(self, path: Path | str):
        """Open a file, or create it.

        Raises:
            GenerationError: For a file with other content, one that another process is writing, and OS errors.
        """
        self._path = Path(path).resolve()
        self._descriptors: list[int] = []  # the last one is written to
        self._done: dict[tuple[str, int], str] = {}
        self._intact = True  # whether all lines are complete, and results that succeeded
        try:
            with os_errors_as(GenerationError, "write", path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._is_new = not self._path.exists()
                if not (self._is_new or self._path.is_file()):
                    raise GenerationError(f"{self._path} is not a regular file", "the name of a new file")
                self._open()
                with self._path.open("rb") as file:
                    self._kept_lines: list[tuple[int, int]] = list(self._read(file))
        except BaseException:
            self.close()
            raise

    def done(self, id: Id, sample: int) -> str | None:
        """The digest of the request whose result for this sample was in the opened file; None without a result."""
        return self._done.get((str(id), sample))

    def write(self, line: bytes) -> None:
        """Append a line. After any exception, Ctrl-C included, the file ends with the line before.

        Raises:
            GenerationError: For OS errors, such as a full disk.
        """
        with os_errors_as(GenerationError, "write", self._path):
            if not self._intact:
                self._rewrite()
            descriptor, rest = self._descriptors[-1], memoryview(line)
            size = os.fstat(descriptor).st_size
            try:
                while rest:
                    rest = rest[os.write(descriptor, rest) :]
            except BaseException:
                os.ftruncate(descriptor, size)
                raise

    def close(self) -> None:
        """Close the file, and remove it if it is new and empty."""
        if self._descriptors and self._is_new and os.fstat(self._descriptors[-1]).st_size == 0:
            self._path.unlink(missing_ok=True)
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []

    def __enter__(self) -> ResultFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> None:
        descriptor = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        self._descriptors.append(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            # Some network drives have no locks, and fail with other errors.
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise GenerationError(f"another process is writing {self._path}", "one process per file") from None

    def _read(self, file: BinaryIO) -> Iterator[tuple[int, int]]:
        """Yield start and end of every result that succeeded."""
        start = 0
        for number, line in enumerate(file, 1):
            fields = self._parse(line)
            if fields is None and (line.endswith(b"\n") or not _is_torn(line)):
                raise GenerationError(
                    f"line {number} of {self._path} is not a result, and the file stays as it is",
                    "the name of a new file, or of one that this command wrote",
                )
            if fields is None or has_failed(fields):
                self._intact = False
            else:
                self._done[str(fields["id"]), fields.get("sample", 0)] = fields["request"]
                self._intact = self._intact and line.endswith(b"\n")
                yield start, start + len(line)
            start += len(line)

    @staticmethod
    def _parse(line: bytes) -> dict[str, Any] | None:
        with suppress(GenerationError):
            value = parse_json_object(line, "the line", GenerationError, "a result")
            if "id" in value and ("error" in value or _has_text(value)):
                return value
        return None

    def _rewrite(self) -> None:
        """Replace the file by its results, without failed ones and a torn last line."""
        with self._path.open("rb") as file, atomic_write(self._path, GenerationError) as copy:
            os.fchmod(copy.fileno(), stat.S_IMODE(os.fstat(file.fileno()).st_mode))
            for start, end in self._kept_lines:
                file.seek(start)
                copy.write(file.read(end - start).rstrip(b"\n") + b"\n")
        self._open()  # the old descriptor keeps its lock, for a process that has opened the replaced file
        self._intact = True


def _has_text(value: dict[str, Any]) -> bool:
    return "text" in value and isinstance(value.get("request"), str) and type(value.get("sample", 0)) is int


def _is_torn(line: bytes) -> bool:
    """Whether a last line without a line end is the beginning of a result, or zeros, as after a power cut."""
    return line[: len(_LINE_START)] == _LINE_START[: len(line)] or not line.strip(b"\0")
