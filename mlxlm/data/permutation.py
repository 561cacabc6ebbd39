"""Shuffled orders without tables: keyed permutations that are evaluated where they are needed."""

from __future__ import annotations

import numpy as np

_ROUNDS = 4


def permutation_keys(*seed: int) -> tuple[np.ndarray, int]:
    """The keys of a permutation, and one more random number of 64 bits, as functions of `seed` alone."""
    state = np.random.SeedSequence(seed).generate_state(_ROUNDS + 1, np.uint64)
    return state[:_ROUNDS], int(state[-1])


def permute(places: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """A keyed pseudo-random permutation of range(n), evaluated at `places` only: uint64, of their shape.

    A balanced Feistel network over the next even power of two, applied again to values that fall outside
    (cycle walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    values = places.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        values[outside] = left << half | right
        outside = values >= n
    return values


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea, Flood, 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
