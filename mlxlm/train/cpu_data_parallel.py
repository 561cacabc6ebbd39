"""A step's rows shared out to the cores of a CPU: each core computes the gradients of its own rows.

MLX's CPU backend runs all operations of a stream on one core, and only the products inside the BLAS on all of
them. Here each core has a Python thread with an MLX stream and compiled graphs of its own, and its products run
on that core alone.

MLX lets about 50 operations wait to be run, all streams together. One stream would take that room and another run
dry: with two threads that evaluate their graphs at once, or one that evaluates both, the cores are idle for a quarter
of the time. So each thread hands over its graph a piece at a time, from waypoint to waypoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from mlxlm.backend.blas import load_blas
from mlxlm.backend.mlx import eval_arrays, mx
from mlxlm.kernels.eval_points import eval_at_points, eval_points


class CPUDataParallel:
    """`function(arrays)`, compiled, on `count` parts of the rows of some arrays at the same time.

    `state`: the other arrays that the function uses, as for `mx.compile`. It may use random numbers, which are a
    function of the key given and of the part.
    """

    def __init__(self, function: Callable[[Any], Any], state: Any, count: int):
        self._state = state
        self._functions = [
            mx.compile(partial(_with_eval_points, function), inputs=[state, mx.random.state], outputs=mx.random.state)
            for _ in range(count)
        ]
        self._building = threading.Lock()  # while a graph is traced, `state` is not what it is to others

    def __call__(self, batches: Sequence[Sequence[np.ndarray | None]]) -> list[Any]:
        """What the function gives for each part of batches of arrays `[rows, ...]`, evaluated.

        An error in a part is raised when all parts have ended.
        """
        count = len(self._functions)
        seeds = mx.random.randint(0, 1 << 31, (count,)).tolist()
        parts = [[tuple(_cut(x, i, count) for x in batch) for batch in batches] for i in range(count)]
        eval_arrays(self._state)  # a thread can't evaluate what another has built
        with load_blas().single_threaded():
            started = [
                _worker(i).start(self._evaluated, *work)
                for i, work in enumerate(zip(self._functions, parts, seeds, strict=True))
            ]
            try:
                wait(started)
            finally:
                wait(started)  # after a Ctrl-C, too: they use the state and the BLAS
        return [future.result() for future in started]

    def _evaluated(self, function: Callable[[Any], Any], part: Any, seed: int) -> Any:
        with self._building:
            mx.random.seed(seed)  # each thread has random numbers of its own
            found, points = function(part)
        eval_at_points(points)
        eval_arrays(found)
        return found


def _with_eval_points(function: Callable[[Any], Any], part: Any) -> tuple[Any, list[mx.array]]:
    with eval_points() as points:
        return function(part), points


def _cut(x: np.ndarray | None, part: int, count: int) -> mx.array | None:
    return None if x is None else mx.array(x[part * len(x) // count : (part + 1) * len(x) // count])


class _Worker:
    """A thread that runs one function after another, for as long as the process lives.

    It never ends by itself, since what MLX keeps for a thread can't be freed at its end without Python's lock.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def start(self, function: Callable[..., Any], *arguments: Any) -> Future:
        future: Future = Future()
        self._work.put((future, function, arguments))
        return future

    def _run(self) -> None:
        while True:
            future, function, arguments = self._work.get()
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)
            del future, function, arguments  # nothing is held while there is nothing to do


_started: list[_Worker] = []


def _worker(number: int) -> _Worker:
    """The thread of a core, the same for all: MLX starts a thread for each stream and never ends it."""
    while len(_started) <= number:
        _started.append(_Worker())
    return _started[number]
