"""Token embeddings and position embeddings."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from mlxlm.backend.mlx import ON_CPU, mx, nn
from mlxlm.utils.errors import GenerationError


class Embedding(nn.Embedding):
    """Token embeddings with a deterministic gradient.

    On a GPU, MLX adds the gradients of equal tokens with atomics, in any order.
    """

    def __call__(self, tokens: mx.array) -> mx.array:
        """Look up `tokens`, int `[B, T]`: `[B, T, hidden]`."""
        return super().__call__(tokens) if ON_CPU else lookup(self.weight, tokens)


@mx.custom_function
def lookup(table: mx.array, tokens: mx.array) -> mx.array:
    """Look up rows of `table` `[V, hidden]`. The gradient is a product with one-hot rows, 512 tokens at a time."""
    return table[tokens]


@lookup.vjp
def _lookup_vjp(primals: list[mx.array], cotangent: mx.array, _output: mx.array) -> tuple[mx.array, mx.array]:
    table, tokens = primals
    flat, rows = tokens.flatten(), cotangent.reshape(-1, table.shape[1])
    total = mx.zeros_like(table)
    for start in range(0, flat.size, 512):
        hot = flat[start : start + 512, None] == mx.arange(table.shape[0])
        total = total + hot.astype(table.dtype).T @ rows[start : start + 512]
    return total, mx.zeros_like(tokens)


class SinusoidalPositions(nn.Module):
    """Sinusoidal position embeddings (Vaswani et al. 2017, section 3.5).

    sin(p / 10000^(2i / hidden)) in dimension 2i of position p, and the cosine of the same in 2i + 1. The table of
    `longest` rows is made on first use and isn't a parameter.
    """

    def __init__(self, longest: int, size: int):
        super().__init__()
        self._longest, self._size = longest, size

    @cached_property
    def _table(self) -> mx.array:
        dims = np.arange(self._size)  # in float64: at position 8000 a float32 angle is wrong by 5e-4
        angles = np.arange(self._longest)[:, None] / 10_000.0 ** ((dims - dims % 2) / self._size)
        return mx.array(np.where(dims % 2, np.cos(angles), np.sin(angles)).astype(np.float32))

    def __call__(self, positions: mx.array) -> mx.array:
        """Look up int `[..., T]`: `[..., T, hidden]`, float32."""
        return self._table[positions]


def position_ids(first: int | mx.array, count: int, longest: int) -> mx.array:
    """Return the positions from `first` on, `[count]`, or `[B, count]` for a `first` of `[B]`.

    Left padding has position 0.

    Raises:
        GenerationError: A position is beyond the table of `longest` rows. MLX doesn't check indices.
    """
    last = (max(first.tolist()) if isinstance(first, mx.array) else first) + count
    if last > longest:
        raise GenerationError(f"position {last} is beyond the model's {longest} positions", "a shorter text")
    if isinstance(first, mx.array):
        return mx.maximum(first[:, None] + mx.arange(count), 0)
    positions = mx.arange(first, first + count)
    return positions if first >= 0 else mx.maximum(positions, 0)


def packed_position_ids(segment_ids: mx.array) -> mx.array:
    """Return the position of each token in its document, int `[B, T]`, from `segment_ids` `[B, T]`."""
    index = mx.arange(segment_ids.shape[1])
    begins = mx.concatenate([mx.ones_like(segment_ids[:, :1]), segment_ids[:, 1:] != segment_ids[:, :-1]], axis=1)
    return index - mx.cummax(mx.where(begins, index, 0), axis=1)
