"""Shuffled orders without tables: keyed permutations that are computed one element at a time."""

from __future__ import annotations

import numpy as np

_ROUNDS = 4


def permutation_keys(*seed: int) -> tuple[np.ndarray, int]:
    """Round keys for `permute`, and another random 64-bit number, derived from `seed`."""
    state = np.random.SeedSequence(seed).generate_state(_ROUNDS + 1, np.uint64)
    return state[:_ROUNDS], int(state[-1])


def permute(indices: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """Apply a keyed pseudorandom permutation of range(n) to `indices`.

    A balanced Feistel network over the next even power of two, applied again to values outside the range (cycle
    walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).

    Args:
        indices: Integers below `n`, 1-D.
        n: Size of the range.
        keys: From `permutation_keys`.

    Returns:
        uint64, of the shape of `indices`.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    values = indices.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for key in keys:
            left, right = right, left ^ (splitmix64(right ^ key) & mask)
        values[outside] = left << half | right
        outside = values >= n
    return values


def splitmix64(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014) : every output bit depends on every input bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
