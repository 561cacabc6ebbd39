"""The loss of a batch, as training differentiates it."""

from __future__ import annotations

from mlxlm._mlx import mx
from mlxlm.kernels import cross_entropy
from mlxlm.model import Decoder


def summed_loss(
    model: Decoder, tokens: mx.array, segments: mx.array | None = None, weights: mx.array | None = None
) -> mx.array:
    """Nats over all targets of a batch, each counted by its weight: a float32 scalar.

    tokens int `[B, T + 1]`, segments int `[B, T]`, weights float32 `[B, T]`: see `mlxlm.data.Batch`.
    """
    within = {} if segments is None else {"segments": segments}
    losses = cross_entropy(model(tokens[:, :-1], **within), tokens[:, 1:])
    return (losses if weights is None else losses * weights).sum()
