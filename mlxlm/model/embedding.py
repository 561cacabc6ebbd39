"""Token embeddings and position embeddings."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from mlxlm.backend.mlx import mx, nn
from mlxlm.utils.errors import GenerationError


class Embedding(nn.Embedding):
    """Token embeddings whose gradient is summed in float32, in a fixed order."""

    def __call__(self, tokens: mx.array) -> mx.array:
        """Look up `tokens`, int `[B, T]`: `[B, T, hidden]`."""
        return lookup(self.weight, tokens)


@mx.custom_function
def lookup(table: mx.array, tokens: mx.array) -> mx.array:
    """Look up rows of `table` `[V, hidden]`.

    The gradient sorts the tokens and sums the rows of each, with one rounding at the end. MLX's own gradient rounds
    after each addition (in bfloat16, 5% of error for 131,072 tokens), on a GPU in any order, and takes four times as
    long on a CPU.
    """
    return table[tokens]


@lookup.vjp
def _lookup_vjp(primals: list[mx.array], cotangent: mx.array, _output: mx.array) -> tuple[mx.array, mx.array]:
    table, tokens = primals
    flat, rows = tokens.flatten(), cotangent.reshape(-1, table.shape[1])
    counts = mx.zeros(table.shape[0], mx.uint32).at[flat].add(mx.array(1, mx.uint32))
    ends = mx.cumsum(counts)
    segments = mx.stack([ends - counts, ends], axis=1)
    sums = mx.segmented_mm(mx.ones((1, flat.size), rows.dtype), rows[mx.argsort(flat)], segments)  # float32 inside
    return sums.reshape(table.shape), mx.zeros_like(tokens)


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
