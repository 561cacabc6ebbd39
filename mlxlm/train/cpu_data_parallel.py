"""Data parallelism over the cores of a CPU: each core computes the gradients of its share of a step's rows.

MLX's CPU backend runs all operations of a stream on one core, except the products inside the BLAS. Here each core has a
Python thread with its own MLX stream and compiled graphs, and its products run on that core alone.

MLX has a queue of about 50 operations for all streams together. If one stream fills it, another runs dry: with two
threads that evaluate their graphs at once, or one that evaluates both, the cores are idle for a quarter of the time. So
each thread evaluates its graph in pieces, from one evaluation point to the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np

from mlxlm.backend.blas import load_blas
from mlxlm.backend.mlx import eval_arrays, mx
from mlxlm.kernels.eval_points import eval_at_points, eval_points


class CPUDataParallel:
    """Runs a compiled function on `count` parts of the rows of a batch at the same time.

    Args:
        function: Called with a list of batches. It may use random numbers, which depend on the random key and the part.
        state: Other arrays that the function uses, as for `mx.compile`.
        count: Number of parts.
    """

    def __init__(self, function: Callable[[Any], Any], state: Any, count: int):
        self._state = state
        self._functions = [
            mx.compile(partial(_with_eval_points, function), inputs=[state, mx.random.state], outputs=mx.random.state)
            for _ in range(count)
        ]
        self._tracing = threading.Lock()  # while a graph is traced, `state` has placeholders

    def __call__(self, batches: Sequence[Mapping[str, np.ndarray]]) -> list[Any]:
        """Return the evaluated results for each part of `batches`, of named arrays `[rows, ...]`.

        An error in a part is raised when all parts have ended.
        """
        count = len(self._functions)
        seeds = mx.random.randint(0, 1 << 31, (count,)).tolist()
        parts = [
            [{name: _part_of(x, i, count) for name, x in batch.items()} for batch in batches] for i in range(count)
        ]
        eval_arrays(self._state)  # a thread can't evaluate a graph that another has built
        with load_blas().single_threaded():
            futures = [
                _worker(i).submit(self._evaluate, *arguments)
                for i, arguments in enumerate(zip(self._functions, parts, seeds, strict=True))
            ]
            try:
                wait(futures)
            finally:
                wait(futures)  # also after a Ctrl-C: they use the state and the BLAS
        return [future.result() for future in futures]

    def _evaluate(self, function: Callable[[Any], Any], part: Any, seed: int) -> Any:
        with self._tracing:
            mx.random.seed(seed)  # each thread has its own random state
            result, points = function(part)
        eval_at_points(points)
        eval_arrays(result)
        return result


def _with_eval_points(function: Callable[[Any], Any], part: Any) -> tuple[Any, list[mx.array]]:
    with eval_points() as points:
        return function(part), points


def _part_of(x: np.ndarray, part: int, count: int) -> mx.array:
    return mx.array(x[part * len(x) // count : (part + 1) * len(x) // count])


class _Worker:
    """A thread that runs functions one after another, as long as the process lives.

    It never ends by itself, because what MLX keeps for a thread can't be freed at its end without Python's lock.
    """

    def __init__(self) -> None:
        self._queue = SimpleQueue[Any]()
        threading.Thread(target=self._run, daemon=True).start()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future = Future[Any]()
        self._queue.put((future, function, arguments))
        return future

    def _run(self) -> None:
        while True:
            future, function, arguments = self._queue.get()
            try:
                future.set_result(function(*arguments))
            except BaseException as error:
                future.set_exception(error)
            del future, function, arguments  # hold no arrays while waiting


_workers: list[_Worker] = []


def _worker(number: int) -> _Worker:
    """Return the thread of a core, shared by all: MLX starts a thread for each stream and never ends it."""
    while len(_workers) <= number:
        _workers.append(_Worker())
    return _workers[number]
