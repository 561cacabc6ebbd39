"""Arrays along a graph, by which it can be evaluated a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from mlxlm.backend.mlx import async_eval_arrays, eval_arrays, mx

_collecting: ContextVar[list[mx.array] | None] = ContextVar("collecting", default=None)


def eval_point(x: mx.array) -> mx.array:
    """x, an array that is in memory anyway: inside of `eval_points`, it becomes one."""
    if (points := _collecting.get()) is not None:
        points.append(x)
    return x


@contextmanager
def eval_points() -> Iterator[list[mx.array]]:
    """The list of those that a graph built inside of this has, in the order in which it was built."""
    token = _collecting.set([])
    try:
        yield _collecting.get()
    finally:
        _collecting.reset(token)


def eval_at_points(points: list[mx.array]) -> None:
    """Evaluate one after another, each begun when the one before the last is done, and let go of them: `points` is
    empty then."""
    last = None
    while points:
        point = points.pop(0)
        async_eval_arrays(point)
        if last is not None:
            eval_arrays(last)
        last = point
    if last is not None:
        eval_arrays(last)
