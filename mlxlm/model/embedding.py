"""Vectors of tokens and of positions."""

from __future__ import annotations

import numpy as np

from mlxlm.backend.mlx import ON_CPU, mx, nn
from mlxlm.utils.errors import GenerationError


class Embedding(nn.Embedding):
    """A table of token vectors whose gradient is the same to the bit every time.

    On a GPU, MLX adds the gradients of equal tokens with atomics, in whatever order they arrive.
    """

    def __call__(self, tokens: mx.array) -> mx.array:
        """tokens int `[B, T]` -> `[B, T, hidden]`"""
        return super().__call__(tokens) if ON_CPU else lookup(self.weight, tokens)


@mx.custom_function
def lookup(table: mx.array, tokens: mx.array) -> mx.array:
    """Rows of `table` `[V, hidden]`; its gradient is a product with one-hot rows, 512 tokens at a time."""
    return table[tokens]


@lookup.vjp
def _lookup_vjp(primals, cotangent, _output):
    table, tokens = primals
    flat, rows = tokens.flatten(), cotangent.reshape(-1, table.shape[1])
    total = mx.zeros_like(table)
    for start in range(0, flat.size, 512):
        hot = flat[start : start + 512, None] == mx.arange(table.shape[0])
        total = total + hot.astype(table.dtype).T @ rows[start : start + 512]
    return total, mx.zeros_like(tokens)


class SinusoidalPositions(nn.Module):
    """Fixed positions (Vaswani et al. 2017, 3.5): sin(p / 10000^(2i / hidden)) in dimension 2i of position p, and the
    cosine of the same in 2i + 1. A table of `longest` rows, made on first use; no parameter."""

    def __init__(self, longest: int, size: int):
        super().__init__()
        self._longest, self._size, self._table = longest, size, None

    def __call__(self, positions: mx.array) -> mx.array:
        """positions int `[..., T]` -> `[..., T, hidden]` float32"""
        if self._table is None:  # in float64: at position 8000 a float32 angle is wrong by 5e-4
            dims = np.arange(self._size)
            angles = np.arange(self._longest)[:, None] / 10_000.0 ** ((dims - dims % 2) / self._size)
            self._table = mx.array(np.where(dims % 2, np.cos(angles), np.sin(angles)).astype(np.float32))
        return self._table[positions]


def position_ids(first: int | mx.array, count: int, longest: int) -> mx.array:
    """The positions `[count]` from `first` on in a table of `longest`; for several rows' `first` `[B]`, those
    `[B, count]`, where padding before a text has its first position.

    Raises GenerationError beyond the table, where MLX, which checks no index, would read whatever lies there.
    """
    last = (max(first.tolist()) if isinstance(first, mx.array) else first) + count
    if last > longest:
        raise GenerationError(f"position {last} is beyond the {longest} that the model has", "a shorter text")
    if isinstance(first, mx.array):
        return mx.maximum(first[:, None] + mx.arange(count), 0)
    positions = mx.arange(first, first + count)
    return positions if first >= 0 else mx.maximum(positions, 0)


def packed_position_ids(segment_ids: mx.array) -> mx.array:
    """The position of each token in its own text, int `[B, T]`; `segment_ids` `[B, T]` numbers the texts of a row."""
    index = mx.arange(segment_ids.shape[1])
    begins = mx.concatenate([mx.ones_like(segment_ids[:, :1]), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
    return index - mx.cummax(mx.where(begins, index, 0), axis=1)
