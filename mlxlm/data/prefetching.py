"""Reads ahead in a thread, so that the disk works while the training step computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def prefetch(read: Callable[[int], T], numbers: Iterable[int], prefetch_factor: int = 2) -> Generator[T, None, None]:
    """Yield `read(n)` for each of `numbers`, in order, computing up to `prefetch_factor` results ahead.

    `read` runs in one thread, one call at a time. An exception in it is raised where its result would have come, and
    ends the iteration; an exception in `numbers` can come up to `prefetch_factor` results early. Close the iterator if
    you may leave it early: then its thread has ended.
    """
    rest = iter(numbers)
    pending: deque[Future[T]] = deque()
    with ThreadPoolExecutor(1, "prefetch") as pool:
        try:
            pending.extend(pool.submit(read, n) for n in islice(rest, prefetch_factor))
            while pending:
                result = pending.popleft().result()
                pending.extend(pool.submit(read, n) for n in islice(rest, 1))
                yield result
        finally:
            for future in pending:
                future.cancel()
