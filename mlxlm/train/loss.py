"""The loss of a batch, as training differentiates it."""

from __future__ import annotations

from mlxlm.backend.mlx import mx
from mlxlm.kernels import linear_cross_entropy
from mlxlm.model import Decoder


def summed_loss(
    model: Decoder, tokens: mx.array, segment_ids: mx.array | None = None, weights: mx.array | None = None
) -> mx.array:
    """Nats over all targets of a batch, each counted by its weight: a float32 scalar.

    tokens int `[B, T + 1]`, segments int `[B, T]`, weights float32 `[B, T]`: see `mlxlm.data.Batch`.
    """
    hidden = model.model(tokens[:, :-1], segment_ids=segment_ids)
    flat = None if weights is None else weights.flatten()
    return linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]), model.head_weight, tokens[:, 1:].flatten(), flat,
        softcap=model.final_logit_softcap, training=True,
    )  # fmt: skip
