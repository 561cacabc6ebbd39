"""Every error that a user can meet: what was wrong, and what would work."""

from __future__ import annotations

import errno
import re
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# In a class of a regular expression: what, beside ASCII's, a terminal obeys or some readers take for a line end.
CONTROLS = "\x7f-\x9f\u2028-\u202e\u2066-\u2069"

_LONGEST = 2000  # characters of a message: a name out of a file can have millions


class MlxlmError(Exception):
    """Base class. `str(error)` is one line of printable characters, whatever names out of a file are part of it;
    `hint` says what would work (shown as "try: ...")."""

    def __init__(self, message: str, hint: str | None = None):
        super().__init__(message)
        self.message = one_line(message)
        self.hint = hint and one_line(hint)

    def __str__(self) -> str:
        return f"{self.message} (try: {self.hint})" if self.hint else self.message


def one_line(text: str) -> str:
    """Lines joined, and what a terminal would obey or can't show (escapes, lone surrogates) written out."""
    text = re.sub(r"\s*[\r\n]\s*", " ", text)
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 200]} ... {text[-200:]}"
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def short_repr(value: Any) -> str:
    """The repr of a value out of a file, of long ones the beginning and the end."""
    short = reprlib.Repr()
    short.maxlist = short.maxtuple = short.maxdict = 12
    short.maxstring = short.maxother = 100
    return short.repr(value)


class PlatformError(MlxlmError):
    """This machine lacks something: an MLX backend, a compiler, a device."""


class ConfigError(MlxlmError):
    """A model configuration or a setting that cannot work."""


class TokenizerError(MlxlmError):
    """A tokenizer that cannot be read, trained or applied."""


class MissingTokenizerError(TokenizerError):
    """A model without any tokenizer."""


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
        raise kind(f"cannot {what} {path}: {reason}", _HINTS.get(error.errno)) from error


_HINTS = {
    errno.ENOSPC: "free some disk space, or choose an output on another disk",
    errno.EDQUOT: "free some of your disk quota, or choose an output on another disk",
    errno.EROFS: "choose an output folder that you can write to",
    errno.EACCES: "choose a path that you have permission for",
    errno.ENOENT: "check the path",
    errno.EEXIST: "a path whose parent is a folder, not a file",
    errno.ENOTDIR: "a path whose parent is a folder, not a file",
}
