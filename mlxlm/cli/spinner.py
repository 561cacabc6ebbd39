"""A spinner on stderr for work that takes longer than a second."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mlxlm.utils.errors import one_line

if TYPE_CHECKING:
    from rich.status import Status
    from rich.text import Text

_DELAY = 1.0  # seconds before the spinner appears


@contextmanager
def spinner(label: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner after one second; yields `update(label)`. Does nothing if stderr is not a terminal.

    Nothing else may be written to the terminal until the end.
    """
    if not sys.stderr.isatty():
        yield lambda label: None
        return
    spinner = _Spinner(label)
    try:
        yield spinner.update
    finally:
        spinner.end()


class _Spinner:
    def __init__(self, label: str):
        self._label = label
        self._status: Status | None = None
        self._ended = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(_DELAY, self._begin)
        self._timer.daemon = True
        self._timer.start()

    def update(self, label: str) -> None:
        with self._lock:
            self._label = label
            if self._status is not None:
                self._status.update(_plain(label))

    def end(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._ended = True
            if self._status is not None:
                self._status.stop()

    def _begin(self) -> None:
        from mlxlm.cli.render import console

        with self._lock:
            if not self._ended:
                self._status = console.status(_plain(self._label))
                self._status.start()


def _plain(label: str) -> Text:
    from rich.text import Text

    return Text(one_line(label))
