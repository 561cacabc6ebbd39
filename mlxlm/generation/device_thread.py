"""The thread on which texts are generated.

MLX arrays belong to the thread that made them until they are evaluated, and a thread that has compiled a function may
abort the process if it ends while Python does. So there is one thread for all models, which lives as long as the
process: at exit it finishes its current step and then waits forever.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

num_failures = 0  # after which results of any engine may be lost, see `DeviceError.results_lost`

_steps: SimpleQueue[Callable[[], bool]] = SimpleQueue()
_lock = threading.Lock()
_thread: threading.Thread | None = None
_parked = threading.Event()


def repeat(step: Callable[[], bool]) -> None:
    """Call `step` on the thread until it returns False, in turn with other steps. It must not raise."""
    _start()
    _steps.put(step)


def run(function: Callable[[], T]) -> T:
    """Call `function` on the thread, between two steps, and return its result or raise its exception."""
    if threading.current_thread() is _thread:
        return function()
    future: Future[T] = Future()

    def once() -> bool:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)
        return False

    repeat(once)
    return future.result()


def _start() -> None:
    global _thread
    with _lock:
        if _parked.is_set():
            raise RuntimeError("the process is ending")
        if _thread is None:
            _thread = threading.Thread(target=_loop, name="mlxlm", daemon=True)
            _thread.start()
            atexit.register(_park)


def _loop() -> None:
    while True:
        step = _steps.get()
        if step():
            _steps.put(step)
        del step  # it may hold a model, which can be freed while this thread waits


def _park() -> None:
    """Let the thread end its step and wait forever, without Python's global lock, while the interpreter ends."""

    def wait_forever() -> bool:
        never = threading.Event()
        _parked.set()
        never.wait()
        return False

    _steps.put(wait_forever)
    _parked.wait()
