"""The kernel of weighted quantiles against sums of integers in NumPy: the results are equal."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxlm.backend.mlx import mx
from mlxlm.kernels.quantile import _quantile_metal

some = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])


def quantile(values, weights, share):
    """The smallest value up to which the weights reach a share of their sum, computed in float32; at least 1."""
    total = int(weights.sum())
    target = min(max(int(np.float32(np.float32(total) * np.float32(share))), 1), total)
    order = np.argsort(abs(values), kind="stable")
    return abs(values[order[np.searchsorted(np.cumsum(weights[order].astype(np.int64)), target)]])


def check(values, weights, share, k):
    values = np.asarray(values, np.float32)
    found = np.array(_quantile_metal(mx.array(values), mx.array(weights), share))
    assert found.shape == (len(values), 1)
    assert found[:, 0].tolist() == [quantile(v, w, share) for v, w in zip(values, weights, strict=True)]
    counted = np.array(_quantile_metal(mx.array(values), None, mx.array(float(k))))
    assert counted[:, 0].tolist() == np.sort(abs(values), axis=-1)[:, k - 1].tolist()


SHAPES = {
    "normal": lambda rng, size: abs(rng.normal(scale=3, size=size)),
    "ties": lambda rng, size: rng.integers(0, 4, size) / 2,
    "removed": lambda rng, size: np.where(rng.random(size) < 0.5, np.inf, rng.exponential(size=size)),
    "one prefix": lambda rng, size: 1 + rng.integers(0, 1 << 12, size) * 2.0**-23,  # differ in the last 12 bits only
    "any size": lambda rng, size: 10.0 ** rng.uniform(-45, 38, size),
    "zeros": lambda rng, size: np.where(rng.random(size) < 0.5, -0.0, 0.0),
    "of both signs": lambda rng, size: rng.normal(scale=3, size=size),
}


@some
@given(
    st.sampled_from([*SHAPES]), st.integers(1, 3), st.integers(1, 40) | st.sampled_from([1024, 1025, 2500]),
    st.one_of(st.sampled_from([1e-12, 0.5, 1.0]), st.floats(1e-6, 1)), st.booleans(), st.integers(0, 2**32 - 1),
)  # fmt: skip
def test_quantiles_equal_numpy(metal, shape, rows, size, share, sparse, seed):
    rng = np.random.default_rng(seed)
    values = SHAPES[shape](rng, (rows, size))
    weights = rng.integers(0, (2**32 - 1) // size, (rows, size), dtype=np.uint32) >> rng.integers(0, 30, (rows, size))
    if sparse:
        weights[rng.random((rows, size)) < 0.7] = 0
    weights[:, rng.integers(size)] += 1
    check(values, weights.astype(np.uint32), share, rng.integers(1, size + 1))


def test_the_largest_sum_of_weights(metal):
    """All of it in one bin; and nothing below the last value."""
    weights = np.zeros((2, 700), np.uint32)
    weights[0, 5] = weights[1, -1] = 2**32 - 1
    check(np.arange(1400).reshape(2, 700), weights, 1.0, 700)


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf])
def test_rows_of_nan_and_without_weights_change_no_other_row(metal, value):
    values = np.stack([np.full(50, value), np.arange(50)]).astype(np.float32)
    weights = np.stack([np.zeros(50), np.ones(50)]).astype(np.uint32)
    assert np.array(_quantile_metal(mx.array(values), mx.array(weights), 0.5))[1].item() == 24
    assert np.array(_quantile_metal(mx.array(values), None, 3))[1].item() == 2


def test_arguments_that_are_not_contiguous(metal):
    values = np.random.default_rng(0).exponential(size=(60, 4)).astype(np.float32)
    weights = np.ones((120, 4), np.uint32)
    found = _quantile_metal(mx.array(values).T, mx.array(weights)[::2].T, 0.5)
    assert np.array(found)[:, 0].tolist() == np.sort(values, axis=0)[29].tolist()
