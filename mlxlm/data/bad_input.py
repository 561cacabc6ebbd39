"""Input that can't be used: an error, or left out and counted."""

from __future__ import annotations

from collections.abc import Callable

from mlxlm.utils.errors import DataError

OnBad = Callable[[DataError], None]
POLICIES = ("stop", "skip")


class BadInput:
    """What is done about a line that is not UTF-8 text or not valid JSON, a row without text, a malformed conversation.

    policy: "stop" raises an error that names it, "skip" leaves it out. Files that can't be read at all (missing, empty,
        damaged, UTF-16) are errors in any case.

    Attributes:
        skipped: how many lines and rows were left out.

    Raises DataError for another policy.
    """

    def __init__(self, policy: str = "stop"):
        if policy not in POLICIES:
            raise DataError(f"on_bad_input is '{policy}'", " or ".join(POLICIES))
        self._stops = policy == "stop"
        self.skipped = 0

    def __call__(self, error: DataError) -> None:
        """Leave out what `error` is about, or raise it with this remedy."""
        if self._stops:
            skip = "--on-bad-input skip"
            raise DataError(error.message, f"{error.hint}, or {skip}" if error.hint else skip) from error
        self.skipped += 1


def raise_error(error: DataError) -> None:
    """For readers without a choice: raise `error` as it is."""
    raise error
