"""Handles the signals that ask a command to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "the terminal was closed"}


@contextmanager
def on_stop_signal(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handler` for STOP_SIGNALS; not for a SIGHUP that is ignored, as under nohup."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, previous in before.items():
        if number != signal.SIGHUP or previous is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


class StopRequest:
    """Asks a training loop to finish its step and stop, and raises KeyboardInterrupt the second time.

    The first signal sets `requested`. A SIGHUP after it is ignored: the shell, the system and a session manager may
    each send one when a terminal is closed.

    Args:
        on_request: Called with the name of the first signal.

    Attributes:
        requested: Whether to stop.
        exit_code: That of a command which was stopped: 130 after Ctrl-C, 129 after SIGHUP, else 143.
    """

    def __init__(self, on_request: Callable[[str], None] = lambda _name: None) -> None:
        self.requested, self.exit_code, self._on_request = False, 128 + signal.SIGTERM, on_request

    def __call__(self) -> bool:
        """Whether to stop."""
        return self.requested

    @contextmanager
    def catch_signals(self) -> Iterator[StopRequest]:
        """Handle the stop signals until the end of the block."""
        with on_stop_signal(self._on_signal):
            yield self

    def _on_signal(self, number: int, _frame: object) -> None:
        if self.requested and number == signal.SIGHUP:
            return
        if self.requested:
            raise KeyboardInterrupt
        self.requested, self.exit_code = True, 128 + number
        self._on_request(STOP_SIGNALS[signal.Signals(number)])
