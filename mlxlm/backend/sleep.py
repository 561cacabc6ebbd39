"""Keeps a Mac awake while it works, and tells how long a machine has slept."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def prevent_sleep() -> Iterator[None]:
    """Keep a Mac from falling asleep inside the block; its display may turn off. A closed lid still ends in sleep.

    caffeinate(8) waits for this process, so that it never outlives it: -i is for idle sleep, -s for all sleep on AC.
    """
    if sys.platform != "darwin":
        yield
        return
    command = ["/usr/bin/caffeinate", "-i", "-s", "-w", str(os.getpid())]
    # In a process group of its own, a Ctrl-C that asks for the last checkpoint doesn't end it.
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0) as process:
        try:
            yield
        finally:
            process.terminate()


def seconds_asleep() -> float:
    """Seconds that this machine has slept so far, from any start.

    The clock that goes on while it sleeps, minus the one that stands still. Setting the time changes neither.
    """
    with_sleep = time.CLOCK_MONOTONIC_RAW if sys.platform == "darwin" else time.CLOCK_BOOTTIME
    return time.clock_gettime(with_sleep) - time.monotonic()
