"""Signals and the keyboard mode of a terminal during a chat."""

from __future__ import annotations

import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any


@contextmanager
def defer_interrupts() -> Iterator[threading.Event]:
    """Let Ctrl-C only set the event: an exception could strike in the middle of a step.

    The line editor reads Ctrl-C as a key and restores this handler when a line is done.
    """
    interrupted = threading.Event()
    with handle_signal(signal.SIGINT, lambda *_: interrupted.set()):
        yield interrupted


def raise_interrupts() -> AbstractContextManager[None]:
    """Let Ctrl-C raise KeyboardInterrupt, for work that changes nothing before it is done."""
    return handle_signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def hide_typing() -> Iterator[None]:
    """Don't echo what is typed during an answer; the line editor reads it afterwards.

    This includes what was typed before a Ctrl-C, which the terminal would discard without NOFLSH.
    """
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    quiet = [*before]
    quiet[3] = quiet[3] & ~(termios.ECHO | termios.ICANON) | termios.NOFLSH

    def set_modes(modes: list[Any]) -> None:
        with suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(descriptor, termios.TCSANOW, modes)

    set_modes(quiet)
    try:
        with handle_signal(signal.SIGCONT, lambda *_: set_modes(quiet)):  # the shell changes the modes during a Ctrl-Z
            yield
    finally:
        set_modes(before)


@contextmanager
def handle_signal(number: signal.Signals, handler: Callable[..., Any]) -> Iterator[None]:
    """Call `handler` on a signal."""
    previous = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, previous)
