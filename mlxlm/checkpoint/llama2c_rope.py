"""The table of rotary angles in a legacy llama2.c file, with the floats that llama2.c's own export writes there.

No program reads these floats, run.c skips them, but with them a file that is read and written again is the same file.
llama2.c's `precompute_freqs_cis` computes in float32 with PyTorch, whose sine and cosine (on x86) differ from the
nearest float32 in 1 of 20 values. Up to angles of 10000 they are the nearest float32 of the polynomial below, which was
fitted to PyTorch 2.13's values (3 of 2 million random angles differ).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mlxlm.config import ModelConfig

_POSITIONS = 4096  # computed at a time
# sin(r) = r + r³ · (C0 + C1 r² + C2 r⁴ + C3 r⁶) for r in [-π/2, π/2]
_SINE = (-0.16666659550392135, 0.00833306624535188, -0.00019809602857472552, 2.6057805533392356e-06)
_PI, _PI_REST = 3.141592651605606, 1.984187159361081e-09  # the product of the first and a small integer is exact


def rope_tables(config: ModelConfig) -> Iterator[np.ndarray]:
    """Cosines of all positions, then sines, float32 `[max_position_embeddings, D/2]` each, in pieces of positions."""
    head = config.head_dim
    exponents = np.arange(0, head, 2, dtype=np.float32) / np.float32(head)
    powers = np.power(config.rope_theta, exponents.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1) / powers
    for shift in (0.5, 0.0):  # cos(x) = sin(x + π/2)
        for first in range(0, config.max_position_embeddings, _POSITIONS):
            last = min(first + _POSITIONS, config.max_position_embeddings)
            angles = np.outer(np.arange(first, last, dtype=np.float32), frequencies)
            yield _sine(angles.astype(np.float64), shift)


def _sine(angles: np.ndarray, shift: float) -> np.ndarray:
    """sin(angles + shift · π), computed in float64 and rounded to float32."""
    nearest = np.rint(angles / np.pi + shift)
    turns = nearest - shift
    r = angles - turns * _PI - turns * _PI_REST
    square = r * r
    c0, c1, c2, c3 = _SINE
    values = r + r * square * (c0 + square * (c1 + square * (c2 + square * c3)))
    return np.where(nearest % 2, -values, values).astype(np.float32)
