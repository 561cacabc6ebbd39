"""What to do with input that can't be used: raise an error, or skip it and count it."""

from __future__ import annotations

from collections.abc import Callable

from mlxlm.data.options import BAD_INPUT_POLICIES
from mlxlm.utils.errors import DataError

OnBad = Callable[[DataError], None]


class BadInput:
    """Handles lines that are not UTF-8 or not JSON, rows without text, and malformed conversations.

    Files that can't be read at all (missing, empty, damaged, UTF-16) are errors with either policy.

    Args:
        policy: "stop" raises an error that names the line or row; "skip" leaves it out.

    Attributes:
        skipped: Number of lines and rows left out.

    Raises:
        DataError: There is no such policy.
    """

    def __init__(self, policy: str = "stop"):
        if policy not in BAD_INPUT_POLICIES:
            raise DataError(f"on_bad_input is '{policy}'", " or ".join(BAD_INPUT_POLICIES))
        self._stop = policy == "stop"
        self.skipped = 0

    def __call__(self, error: DataError) -> None:
        """Skip the input that caused `error`, or raise the error with a hint at `--on-bad-input skip`."""
        if self._stop:
            skip = "--on-bad-input skip"
            raise DataError(error.message, f"{error.hint}, or {skip}" if error.hint else skip) from error
        self.skipped += 1


def raise_error(error: DataError) -> None:
    """Raise `error` as it is: the default for `on_bad`."""
    raise error
