"""The chunks of the gated delta rule are the rule, token by token."""

import numpy as np
import pytest

from mlxlm.backend.mlx import mx
from mlxlm.model.gated_delta import gated_delta_rule, gated_delta_step, inverse

B, H, T, K, V = 2, 2, 150, 16, 8  # three chunks


def inputs(correlated):
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(2, B, H, T, K))
    beta, log_decay = rng.uniform(size=(B, H, T)), -0.3 * rng.exponential(size=(B, H, T))
    if correlated:  # nearly equal keys that are learned at once and hardly forgotten
        k, beta, log_decay = 0.02 * k + rng.normal(size=K), 0.9 + 0.1 * beta, 0.01 * log_decay
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    return [mx.array(x.astype(np.float32)) for x in (q, k, rng.normal(size=(B, H, T, V)), log_decay, beta)]


def token_by_token(q, k, v, log_decay, beta, segment_ids=None):
    q, k, v, log_decay, beta = (np.array(x, np.float64) for x in (q, k, v, log_decay, beta))
    state, out = np.zeros((B, H, K, V)), np.zeros(v.shape)
    for t in range(q.shape[2]):
        if segment_ids is not None and t:
            state *= (segment_ids[:, t] == segment_ids[:, t - 1])[:, None, None, None]
        state *= np.exp(log_decay[:, :, t])[..., None, None]
        change = (v[:, :, t] - np.einsum("bhk,bhkv->bhv", k[:, :, t], state)) * beta[:, :, t, None]
        state += k[:, :, t][..., None] * change[:, :, None]
        out[:, :, t] = np.einsum("bhk,bhkv->bhv", q[:, :, t], state)
    return out, state


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("correlated", [False, True])
def test_chunks_equal_single_tokens(correlated, packed):
    arrays = inputs(correlated)
    ids = np.sort(np.random.default_rng(1).integers(0, 5, (B, T)), axis=1) if packed else None
    *found, _ = gated_delta_rule(*arrays, segment_ids=None if ids is None else mx.array(ids))
    for one, other in zip(found, token_by_token(*arrays, ids), strict=True):
        np.testing.assert_allclose(np.array(one), other, atol=1e-5)


def test_a_text_in_pieces():
    arrays = inputs(True)
    wanted, last = token_by_token(*arrays)
    first, state, _ = gated_delta_rule(*(x[:, :, :70] for x in arrays))
    second, state, state_after = gated_delta_rule(*(x[:, :, 70:-1] for x in arrays), state)
    third, state = gated_delta_step(*(x[:, :, -1] for x in arrays), state)
    found = mx.concatenate([first, second, third[:, :, None]], axis=2)
    np.testing.assert_allclose(np.array(found), wanted, atol=1e-5)
    np.testing.assert_allclose(np.array(state), last, atol=1e-5)
    for n in (1, 10, 64):
        _, before = token_by_token(*(x[:, :, : 70 + n] for x in arrays))
        np.testing.assert_allclose(np.array(state_after(n)), before, atol=1e-5)


def test_gradients_equal_finite_differences():
    """Over the border of a chunk, along a random direction; of the correlated keys, whose system is the hardest."""
    arrays = inputs(True)
    rng = np.random.default_rng(2)
    weights, directions = rng.normal(size=(B, H, T, V)), [rng.normal(size=x.shape) for x in arrays]
    gradients = mx.grad(lambda *xs: (gated_delta_rule(*xs)[0] * mx.array(weights, mx.float32)).sum(), range(5))(*arrays)
    slope = sum((np.array(g, np.float64) * d).sum() for g, d in zip(gradients, directions, strict=True))

    def at(step):
        moved = [np.array(x, np.float64) + step * d for x, d in zip(arrays, directions, strict=True)]
        return (token_by_token(*moved)[0] * weights).sum()

    difference = (at(1e-6) - at(-1e-6)) / 2e-6
    size = np.sqrt(sum((np.array(g, np.float64) ** 2).sum() for g in gradients))
    assert abs(slope - difference) <= 1e-4 * size


def test_inverse_of_an_ill_conditioned_matrix():
    """The powers of such a matrix grow to 1e17, its inverse doesn't: a series of products would lose all digits."""
    lower = np.tril(np.ones((64, 64)), -1) + 0.01 * np.tril(np.random.default_rng(0).normal(size=(64, 64)), -1)
    wanted = np.linalg.inv(np.eye(64) + lower)
    np.testing.assert_allclose(np.array(inverse(mx.array(lower.astype(np.float32)))), wanted, atol=1e-5)
