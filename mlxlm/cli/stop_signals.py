"""The signals that ask a command to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "the terminal is gone"}


@contextmanager
def on_stop_signal(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """`handler` has the signals of STOPS, but for a SIGHUP that is ignored, which nohup asks for."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    for number, there in before.items():
        if number != signal.SIGHUP or there is not signal.SIG_IGN:
            signal.signal(number, handler)
    try:
        yield
    finally:
        for number, there in before.items():
            signal.signal(number, there)
