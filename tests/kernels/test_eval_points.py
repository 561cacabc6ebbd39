"""A graph is evaluated in pieces, with the same values and less memory."""

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.kernels.eval_points import eval_at_points, eval_point, eval_points


def test_points_are_collected_in_order():
    outside = eval_point(mx.zeros((1,)))
    with eval_points() as points:
        first = eval_point(mx.ones((2,)) + 1)
        with eval_points() as inner:
            apart = eval_point(first * 3)
        last = eval_point(first * 2)
    assert [x is y for x, y in zip(points, (first, last), strict=True)] == [True, True]
    assert len(inner) == 1 and inner[0] is apart
    assert outside.item() == 0


def test_values_are_unchanged_and_the_list_is_emptied():
    def chain(x):
        for i in range(12):
            x = eval_point(mx.sin(x) + i)
        return x

    x = mx.linspace(0, 1, 1000)
    with eval_points() as points:
        y = chain(x)
    assert len(points) == 12
    eval_at_points(points)
    assert points == []
    np.testing.assert_array_equal(np.array(y), np.array(chain(x)))
    eval_at_points([])


def test_evaluated_points_are_released():
    """A few of a chain of 40 arrays of 4 MB are in memory at a time."""
    x = mx.zeros((1 << 20,))
    mx.eval(x)
    with eval_points() as points:
        for _ in range(40):
            x = eval_point(x + 1)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    eval_at_points(points)
    assert x[0].item() == 40
    assert mx.get_peak_memory() - before < 6 * (4 << 20)
