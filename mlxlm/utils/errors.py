"""The errors that mlxlm raises: what was wrong, and a hint of what would work."""

from __future__ import annotations

import errno
import re
import reprlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

# Characters beyond ASCII's that control a terminal or are line ends for some readers, for a regular expression's class.
CONTROLS = "\x7f-\x9f\u2028-\u202e\u2066-\u2069"

_MAX_MESSAGE = 2000  # characters: a name from a file can have millions


# An argument that a message or a hint names: `seed`, `seed=0`.
_ARGUMENT = re.compile(r"`(\w+)(?:=([^`]*))?`")


class MlxlmError(Exception):
    """Base class of all errors of mlxlm.

    `str(error)` is one line of printable characters, even if the message contains names from a file. Messages and hints
    name the arguments of a function in backticks, with or without a value; a command shows its options instead.

    Attributes:
        message: What was wrong.
        hint: What would work, shown as "(try: ...)", or None.
        is_operator_hint: Whether only the person who started the program can follow the hint; a server leaves it out.
        show_argument: Set by a command: gets a name and a value, and returns the option, or None for another name.
    """

    show_argument: ClassVar[Callable[[str, str | None], str | None] | None] = None

    def __init__(self, message: str, hint: str | None = None, *, is_operator_hint: bool = False):
        super().__init__(message)
        self.message = one_line(message)
        self.hint = hint and one_line(hint)
        self.is_operator_hint = is_operator_hint

    def __str__(self) -> str:
        text = f"{self.message} (try: {self.hint})" if self.hint else self.message
        if (show := MlxlmError.show_argument) is None:
            return text
        return _ARGUMENT.sub(lambda match: show(match[1], match[2]) or match[0], text)

    def prefixed(self, place: object, error_type: type[MlxlmError] | None = None) -> MlxlmError:
        """Return a copy of this error with `place`, such as the file that it is about, in front of its message.

        Args:
            place: Shown as "place: message".
            error_type: The class of the copy, if not this one's.
        """
        cls = error_type or type(self)
        message = one_line(f"{place}: {self.message}")
        error = cls.__new__(cls, message)  # not __init__, whose arguments differ between classes
        error.__dict__ |= self.__dict__ | {"message": message}
        return error


def one_line(text: str) -> str:
    """Join lines, and escape control characters and lone surrogates, so that a terminal can show the text."""
    text = re.sub(r"\s*[\r\n]\s*", " ", text)
    if len(text) > _MAX_MESSAGE:
        text = f"{text[: _MAX_MESSAGE - 200]} ... {text[-200:]}"
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def short_repr(value: Any) -> str:
    """The repr of a value from a file, shortened in the middle."""
    short = reprlib.Repr()
    short.maxlist = short.maxtuple = short.maxdict = 12
    short.maxstring = short.maxother = 100
    return short.repr(value)


class PlatformError(MlxlmError):
    """This machine lacks an MLX backend, a compiler or a device."""


class ConfigError(MlxlmError):
    """A model configuration or a setting can't work."""


class ArgumentError(ConfigError):
    """Arguments of a function contradict each other, or one has no effect."""


class TokenizerError(MlxlmError):
    """A tokenizer can't be read, trained or used."""


class MissingTokenizerError(TokenizerError):
    """A model has no tokenizer."""


class TextTooLongError(TokenizerError):
    """A text has far more tokens than the caller can use."""

    def __init__(self, max_length: int):
        super().__init__(f"the text has more than {max_length} tokens", "a shorter one")


class DataError(MlxlmError):
    """Text or token shards can't be read or are too small."""


class CheckpointError(MlxlmError):
    """Weights or a run directory can't be read or written."""


class TrainingError(MlxlmError):
    """A run had to stop; the message names the last good checkpoint."""


class DeviceError(MlxlmError):
    """The device ended a computation, or lacked the memory for it.

    Attributes:
        out_of_memory: Whether it lacked memory.
        results_lost: Whether other results are lost, too: whatever had been started on the device and not been read.
    """

    def __init__(self, message: str, hint: str, *, out_of_memory: bool, results_lost: bool):
        super().__init__(message, hint)
        self.out_of_memory, self.results_lost = out_of_memory, results_lost


class GenerationError(MlxlmError):
    """A prompt or a sampling option can't work."""


class MemoryLimitError(GenerationError):
    """A text needs more memory than there may be for keys and values. It may be served later."""


class PromptTooLongError(GenerationError):
    """A prompt can't be served, now or later: the model's context or the memory is too small for it."""


@contextmanager
def os_errors_as(error_type: type[MlxlmError], action: str, path: Path | str) -> Iterator[None]:
    """Convert an OSError (missing file, read-only or full disk) to an error of mlxlm.

    Args:
        error_type: The error to raise.
        action: Completes "cannot ...", such as "read".
        path: The file or folder that the error message names.
    """
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise error_type(f"cannot {action} {path}: {reason}", _HINTS.get(error.errno or 0)) from error


_HINTS = {
    errno.ENOSPC: "free some disk space, or choose an output on another disk",
    errno.EDQUOT: "free some of your disk quota, or choose an output on another disk",
    errno.EROFS: "choose an output folder that you can write to",
    errno.EACCES: "choose a path that you have permission for",
    errno.ENOENT: "check the path",
    errno.EEXIST: "a path whose parent is a folder, not a file",
    errno.ENOTDIR: "a path whose parent is a folder, not a file",
}
