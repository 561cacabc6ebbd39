"""Reading ahead in a thread, so that the disk works while the step computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

T = TypeVar("T")


def prefetch(read: Callable[[int], T], numbers: Iterable[int], prefetch_factor: int = 2) -> Iterator[T]:
    """`read(n)` for each of `numbers`, in order, up to `prefetch_factor` of them before they are asked for.

    `read` runs in one thread of its own, one call after another. What it raises is raised where its result would have
    come, and nothing after it is read; an error of `numbers` itself comes up to `prefetch_factor` results early. When the
    iterator ends or is closed, the thread has ended: close it where it may be left early.
    """
    rest = iter(numbers)
    pending: deque[Future[T]] = deque()
    with ThreadPoolExecutor(1, "read ahead") as pool:
        try:
            pending.extend(pool.submit(read, n) for n in islice(rest, prefetch_factor))
            while pending:
                found = pending.popleft().result()
                pending.extend(pool.submit(read, n) for n in islice(rest, 1))
                yield found
        finally:
            for future in pending:
                future.cancel()
