"""The chunks of the gated delta rule and of a state space scan are the recurrence, token by token."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.model.gated_delta import gated_delta_rule, gated_delta_step, inverse
from mlxlm.model.mamba2 import state_space_scan, state_space_step

B, H, T = 2, 2, 150  # three chunks


class Recurrence(NamedTuple):
    scan: Callable
    step: Callable
    token_by_token: Callable
    arrays: list[np.ndarray]
    axis: int  # of the tokens
    tolerance: float

    def part(self, arrays, first, end):
        return [x[(slice(None),) * self.axis + (slice(first, end),)] for x in arrays]


def delta_rule_by_token(q, k, v, log_decay, beta, segment_ids=None):
    state, out = np.zeros((B, H, k.shape[3], v.shape[3])), np.zeros(v.shape)
    for t in range(q.shape[2]):
        if segment_ids is not None and t:
            state *= (segment_ids[:, t] == segment_ids[:, t - 1])[:, None, None, None]
        state *= np.exp(log_decay[:, :, t])[..., None, None]
        change = (v[:, :, t] - np.einsum("bhk,bhkv->bhv", k[:, :, t], state)) * beta[:, :, t, None]
        state += k[:, :, t][..., None] * change[:, :, None]
        out[:, :, t] = np.einsum("bhk,bhkv->bhv", q[:, :, t], state)
    return out, state


def state_space_by_token(values, log_decay, keys, queries, segment_ids=None):
    state, out = np.zeros((*values.shape[:3], keys.shape[4], values.shape[4])), np.zeros(values.shape)
    for t in range(values.shape[3]):
        if segment_ids is not None and t:
            state *= (segment_ids[:, t] == segment_ids[:, t - 1])[:, None, None, None, None]
        state = state * np.exp(log_decay[:, :, :, t])[..., None, None]
        state += keys[:, :, :, t, :, None] * values[:, :, :, t, None]
        out[:, :, :, t] = np.einsum("bgs,bgrsp->bgrp", queries[:, :, 0, t], state)
    return out, state


def delta_rule(correlated):
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, B, H, T, 16))
    beta, log_decay = rng.uniform(size=(B, H, T)), -0.3 * rng.exponential(size=(B, H, T))
    if correlated:  # nearly equal keys that are learned at once and hardly forgotten: the system is the hardest
        k, beta, log_decay = 0.02 * k + rng.normal(size=16), 0.9 + 0.1 * beta, 0.01 * log_decay
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    arrays = [q, k, rng.normal(size=(B, H, T, 8)), log_decay, beta]
    return Recurrence(gated_delta_rule, gated_delta_step, delta_rule_by_token, arrays, 2, 1e-5)


def state_space():
    rng = np.random.default_rng(0)
    values, log_decay = rng.normal(size=(B, H, 3, T, 8)), -0.3 * rng.exponential(size=(B, H, 3, T))
    log_decay[..., ::40] = -400  # nothing is left of the state
    arrays = [values, log_decay, *rng.normal(size=(2, B, H, 1, T, 12))]
    return Recurrence(state_space_scan, state_space_step, state_space_by_token, arrays, 3, 1e-4)


@pytest.fixture(params=["delta rule", "delta rule, correlated keys", "state space"])
def recurrence(request):
    made = state_space() if request.param == "state space" else delta_rule("correlated" in request.param)
    return made._replace(arrays=[x.astype(np.float32).astype(np.float64) for x in made.arrays])


def mlx(arrays):
    return [mx.array(x.astype(np.float32)) for x in arrays]


@pytest.mark.parametrize("packed", [False, True])
def test_chunks_equal_single_tokens(recurrence, packed):
    ids = np.sort(np.random.default_rng(1).integers(0, 5, (B, T)), axis=1) if packed else None
    *found, _ = recurrence.scan(*mlx(recurrence.arrays), segment_ids=None if ids is None else mx.array(ids))
    for one, other in zip(found, recurrence.token_by_token(*recurrence.arrays, ids), strict=True):
        np.testing.assert_allclose(np.array(one), other, atol=recurrence.tolerance)


def test_a_text_in_pieces(recurrence):
    arrays, atol = recurrence.arrays, recurrence.tolerance
    wanted, last = recurrence.token_by_token(*arrays)
    first, state, _ = recurrence.scan(*mlx(recurrence.part(arrays, 0, 70)))
    second, state, state_after = recurrence.scan(*mlx(recurrence.part(arrays, 70, -1)), state)
    third, state = recurrence.step(*(x.squeeze(recurrence.axis) for x in mlx(recurrence.part(arrays, -1, T))), state)
    found = mx.concatenate([first, second, mx.expand_dims(third, recurrence.axis)], axis=recurrence.axis)
    np.testing.assert_allclose(np.array(found), wanted, atol=atol)
    np.testing.assert_allclose(np.array(state), last, atol=atol)
    for n in (1, 10, 64):
        _, before = recurrence.token_by_token(*recurrence.part(arrays, 0, 70 + n))
        np.testing.assert_allclose(np.array(state_after(n)), before, atol=atol)


def test_gradients_equal_finite_differences(recurrence):
    """Over the borders of chunks, along a random direction."""
    arrays, rng = recurrence.arrays, np.random.default_rng(2)
    out, _ = recurrence.token_by_token(*arrays)
    weights, directions = rng.normal(size=out.shape), [rng.normal(size=x.shape) for x in arrays]

    def loss(*xs):
        return (recurrence.scan(*xs)[0] * mx.array(weights, mx.float32)).sum()

    gradients = [np.array(x, np.float64) for x in mx.grad(loss, range(len(arrays)))(*mlx(arrays))]
    slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True))

    def at(step):
        moved = [x + step * d for x, d in zip(arrays, directions, strict=True)]
        return (recurrence.token_by_token(*moved)[0] * weights).sum()

    difference = (at(1e-6) - at(-1e-6)) / 2e-6
    assert abs(slope - difference) <= 1e-4 * np.sqrt(sum((g**2).sum() for g in gradients))


def test_inverse_of_an_ill_conditioned_matrix():
    """The powers of such a matrix grow to 1e17, its inverse doesn't: a series of products would lose all digits."""
    lower = np.tril(np.ones((64, 64)), -1) + 0.01 * np.tril(np.random.default_rng(0).normal(size=(64, 64)), -1)
    wanted = np.linalg.inv(np.eye(64) + lower)
    np.testing.assert_allclose(np.array(inverse(mx.array(lower.astype(np.float32)))), wanted, atol=1e-5)
