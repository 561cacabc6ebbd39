"""A function over many pieces, some at once: NumPy lets other threads run while it computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from mlxlm.backend import platform

Piece = TypeVar("Piece")
Result = TypeVar("Result")

_MOST_THREADS = 8  # each holds a piece and its temporaries; the disk is slower than eight


def parallel_map(function: Callable[[Piece], Result], pieces: Iterable[Piece]) -> Iterator[Result]:
    """`function` of each piece, in their order. `pieces` is drawn from in this thread, and is at most one piece for
    each core ahead of what was taken. An error of `function` or `pieces` is raised here, and the rest is dropped."""
    threads = min(platform.cpu_cores(), _MOST_THREADS)
    if threads == 1:
        yield from map(function, pieces)
        return
    pool = ThreadPoolExecutor(threads, thread_name_prefix="gguf")
    waiting: deque[Future[Result]] = deque()
    try:
        for piece in pieces:
            waiting.append(pool.submit(function, piece))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
