"""Every error that a user can meet: what was wrong, and what would work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class MlxlmError(Exception):
    """Base class. `str(error)` is one line; `hint` says what would work (shown as "try: ...")."""

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} (try: {self.hint})" if self.hint else self.message


class PlatformError(MlxlmError):
    """This machine lacks something: an MLX backend, a compiler, a device."""


class ConfigError(MlxlmError):
    """A model configuration or a setting that cannot work."""


class TokenizerError(MlxlmError):
    """A tokenizer that cannot be read, trained or applied."""


class DataError(MlxlmError):
    """Text or token shards that cannot be read or are too small."""


class CheckpointError(MlxlmError):
    """Weights or a run directory that cannot be read or written."""


class TrainingError(MlxlmError):
    """A run that had to stop; the last good checkpoint is named."""


class GenerationError(MlxlmError):
    """A prompt or a sampling setting that cannot be served."""


@contextmanager
def os_errors_as(kind: type[MlxlmError], what: str, path: Path | str) -> Iterator[None]:
    """Turn an OSError on `path` (missing, read-only, full disk) into one line of `kind`.

    `what` completes "cannot ...": `os_errors_as(DataError, "read", path)`.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        hints = {
            "No space left on device": "free some disk space, or choose an output on another disk",
            "Read-only file system": "choose an output folder that you can write to",
            "Permission denied": "choose a path that you have permission for",
            "No such file or directory": "check the path",
            "File exists": "a path whose parent is a folder, not a file",
            "Not a directory": "a path whose parent is a folder, not a file",
        }
        raise kind(f"cannot {what} {path}: {reason}", hints.get(reason)) from error
