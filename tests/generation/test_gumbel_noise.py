"""Gumbel noise: its distribution, its resolution, and the seeds that it depends on."""

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.generation.gumbel_noise import _exponential, derive_seed, negative_gumbel_noise, token_noise


def test_gumbel_noise_has_a_fine_upper_tail():
    """The 67 highest or so of 4M numbers all differ, and are as many as they should be.

    -log(u) has few values there, and unlikely tokens of a large vocabulary would be short of draws.
    """
    keys = [token_noise(5, step)[0] for step in range(16)]
    top = np.concatenate(
        [
            noise[noise > 11]
            for noise in (np.array(-negative_gumbel_noise(mx.array([key], mx.uint32), 250_000)) for key in keys)
        ]
    )
    expected = 4_000_000 * -np.expm1(-np.exp(-11))
    assert abs(len(top) - expected) < 4 * expected**0.5
    assert len(set(top.tolist())) == len(top)


def test_gumbel_noise_follows_its_distribution():
    """Kolmogorov-Smirnov distance of 100,000 numbers to exp(-exp(-x)), below its 99.99 % quantile."""
    noise = np.sort(
        np.array(-negative_gumbel_noise(mx.array([token_noise(1, 1)[0]], mx.uint32), 100_000))[0].astype(np.float64)
    )
    assert np.isfinite(noise).all()
    distance = np.abs(np.exp(-np.exp(-noise)) - (np.arange(100_000) + 0.5) / 100_000).max()
    assert distance < 2.23 / 100_000**0.5


def test_exponentials_are_exact_at_both_ends():
    u = np.concatenate([np.logspace(-9.9, -0.01, 2000), 1 - np.logspace(-7, -0.3, 1000)]).astype(np.float32)
    u = u[u < 1]
    np.testing.assert_allclose(np.array(_exponential(mx.array(u))), -np.log1p(-u.astype(np.float64)), rtol=4e-7)


def test_padded_vocabularies_share_their_noise():
    keys = mx.array([token_noise(1, step)[0] for step in range(3)], mx.uint32)
    small, large = negative_gumbel_noise(keys, 151_936), negative_gumbel_noise(keys, 152_064)
    assert mx.array_equal(small, large[:, :151_936])


def test_derived_seeds_differ_in_every_part():
    ids = ("1", "2", "1\n2", "\u00e9")
    seeds = {derive_seed(seed, id, sample) for seed in range(10) for id in ids for sample in range(10)}
    assert len(seeds) == 400 and all(0 <= seed < 2**53 for seed in seeds)
    assert derive_seed(1, "a", 2) == 2229106196240772  # for ever: results are made again from it
