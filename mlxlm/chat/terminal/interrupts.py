"""Signals and the keyboard mode of a terminal during a chat."""

from __future__ import annotations

import signal
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any


@contextmanager
def defer_interrupts() -> Iterator[threading.Event]:
    """Let Ctrl-C only set the event: an exception could strike in the middle of a step.

    The line editor reads Ctrl-C as a key and restores this handler when a line is done.
    """
    interrupted = threading.Event()
    with _handler(signal.SIGINT, lambda *_: interrupted.set()):
        yield interrupted


@contextmanager
def raise_interrupts() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt, for work that changes nothing before it is done."""
    with _handler(signal.SIGINT, signal.default_int_handler):
        yield


@contextmanager
def handle_hang_up(on_hang_up: Callable[[], None]) -> Iterator[None]:
    """Call `on_hang_up` when the terminal is closed."""
    with _handler(signal.SIGHUP, lambda *_: on_hang_up()):
        yield


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
        with _handler(signal.SIGCONT, lambda *_: set_modes(quiet)):  # the shell changes the modes during a Ctrl-Z
            yield
    finally:
        set_modes(before)


@contextmanager
def _handler(number: signal.Signals, handler: Callable[..., Any]) -> Iterator[None]:
    previous = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, previous)
