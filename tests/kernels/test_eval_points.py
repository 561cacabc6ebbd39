"""A graph can be evaluated a piece at a time, with the same values and no more in memory."""

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.kernels.eval_points import evaluate_along, waypoint, waypoints


def test_points_are_those_of_the_graph_built_inside_in_its_order():
    outside = waypoint(mx.zeros((1,)))
    with waypoints() as points:
        first = waypoint(mx.ones((2,)) + 1)
        with waypoints() as inner:
            apart = waypoint(first * 3)
        last = waypoint(first * 2)
    assert [x is y for x, y in zip(points, (first, last), strict=True)] == [True, True]
    assert len(inner) == 1 and inner[0] is apart
    assert outside.item() == 0


def test_values_are_as_without_points_and_the_list_is_let_go_of():
    def chain(x):
        for i in range(12):
            x = waypoint(mx.sin(x) + i)
        return x

    x = mx.linspace(0, 1, 1000)
    with waypoints() as points:
        y = chain(x)
    assert len(points) == 12
    evaluate_along(points)
    assert points == []
    np.testing.assert_array_equal(np.array(y), np.array(chain(x)))
    evaluate_along([])


def test_what_is_done_is_not_kept():
    """Of a chain of 40 arrays of 4 MB, a few are alive at a time."""
    x = mx.zeros((1 << 20,))
    mx.eval(x)
    with waypoints() as points:
        for _ in range(40):
            x = waypoint(x + 1)
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    evaluate_along(points)
    assert x[0].item() == 40
    assert mx.get_peak_memory() - before < 6 * (4 << 20)
