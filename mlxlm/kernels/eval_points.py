"""Marks arrays in a lazy graph, so that the graph can be evaluated in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from mlxlm.backend.mlx import async_eval_arrays, eval_arrays, mx

_collecting: ContextVar[list[mx.array] | None] = ContextVar("collecting", default=None)


def eval_point(x: mx.array) -> mx.array:
    """Mark x as an evaluation point inside of `eval_points`, and return it. x should be needed in memory anyway."""
    if (points := _collecting.get()) is not None:
        points.append(x)
    return x


@contextmanager
def eval_points() -> Iterator[list[mx.array]]:
    """Context manager that yields the list of marked arrays, in the order in which the graph is built."""
    points: list[mx.array] = []
    token = _collecting.set(points)
    try:
        yield points
    finally:
        _collecting.reset(token)


def eval_at_points(points: list[mx.array]) -> None:
    """Evaluate the arrays in order, at most two at a time, and release them: `points` is empty afterwards."""
    last = None
    while points:
        point = points.pop(0)
        async_eval_arrays(point)
        if last is not None:
            eval_arrays(last)
        last = point
    if last is not None:
        eval_arrays(last)
