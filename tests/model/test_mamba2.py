"""The chunks of a state space scan are the recurrence, token by token."""

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.model.mamba2 import state_space_scan, state_space_step

B, G, R, T, P, S = 2, 2, 3, 150, 8, 12  # three chunks


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    values, log_decay = rng.normal(size=(B, G, R, T, P)), -0.3 * rng.exponential(size=(B, G, R, T))
    log_decay[..., ::40] = -400  # nothing is left of the state
    return [mx.array(x.astype(np.float32)) for x in (values, log_decay, *rng.normal(size=(2, B, G, 1, T, S)))]


def token_by_token(values, log_decay, keys, queries, segment_ids=None):
    values, log_decay, keys, queries = (np.array(x, np.float64) for x in (values, log_decay, keys, queries))
    state, out = np.zeros((B, G, R, S, P)), np.zeros(values.shape)
    for t in range(values.shape[3]):
        if segment_ids is not None and t:
            state *= (segment_ids[:, t] == segment_ids[:, t - 1])[:, None, None, None, None]
        state = state * np.exp(log_decay[:, :, :, t])[..., None, None]
        state += keys[:, :, :, t, :, None] * values[:, :, :, t, None]
        out[:, :, :, t] = np.einsum("bgs,bgrsp->bgrp", queries[:, :, 0, t], state)
    return out, state


@pytest.mark.parametrize("packed", [False, True])
def test_chunks_equal_single_tokens(arrays, packed):
    ids = np.sort(np.random.default_rng(1).integers(0, 5, (B, T)), axis=1) if packed else None
    *found, _ = state_space_scan(*arrays, segment_ids=None if ids is None else mx.array(ids))
    for one, other in zip(found, token_by_token(*arrays, ids), strict=True):
        np.testing.assert_allclose(np.array(one), other, atol=1e-4)


def test_a_text_in_pieces(arrays):
    wanted, last = token_by_token(*arrays)
    first, state, _ = state_space_scan(*(x[:, :, :, :70] for x in arrays))
    second, state, state_after = state_space_scan(*(x[:, :, :, 70:-1] for x in arrays), state)
    third, state = state_space_step(*(x[:, :, :, -1] for x in arrays), state)
    found = mx.concatenate([first, second, third[:, :, :, None]], axis=3)
    np.testing.assert_allclose(np.array(found), wanted, atol=1e-4)
    np.testing.assert_allclose(np.array(state), last, atol=1e-4)
    for n in (1, 10, 64):
        _, before = token_by_token(*(x[:, :, :, : 70 + n] for x in arrays))
        np.testing.assert_allclose(np.array(state_after(n)), before, atol=1e-4)


def test_gradients_equal_finite_differences(arrays):
    """Over the borders of chunks, along a random direction."""
    rng = np.random.default_rng(2)
    weights, directions = rng.normal(size=(B, G, R, T, P)), [rng.normal(size=x.shape) for x in arrays]
    gradients = mx.grad(lambda *xs: (state_space_scan(*xs)[0] * mx.array(weights, mx.float32)).sum(), range(4))(*arrays)
    slope = sum((np.array(g, np.float64) * d).sum() for g, d in zip(gradients, directions, strict=True))

    def at(step):
        moved = [np.array(x, np.float64) + step * d for x, d in zip(arrays, directions, strict=True)]
        return (token_by_token(*moved)[0] * weights).sum()

    difference = (at(1e-6) - at(-1e-6)) / 2e-6
    size = np.sqrt(sum((np.array(g, np.float64) ** 2).sum() for g in gradients))
    assert abs(slope - difference) <= 1e-4 * size
