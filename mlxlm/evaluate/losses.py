"""The summed loss of a batch, for all evaluations."""

from __future__ import annotations

import math

import numpy as np

from mlxlm.backend.mlx import eval_arrays, mx, nn
from mlxlm.kernels import cross_entropy, linear_cross_entropy
from mlxlm.model import Decoder

_POSITIONS = 512  # whose logits a quantized head computes at a time: 256 MB for a vocabulary of 128k


def perplexity(loss: float) -> float:
    """exp(loss), or infinity if that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def sum_nll(
    model: nn.Module,
    tokens: np.ndarray,
    loss_weights: np.ndarray,
    segment_ids: np.ndarray | None = None,
    *,
    start: int = 0,
) -> float:
    """The weighted sum of the negative log-likelihood of a batch's targets, in nats.

    The logits of a `Decoder` are never in memory as a whole; other models compute those of one row at a time.

    Args:
        model: Is called without a cache.
        tokens: int `[B, T + 1]`, see `mlxlm.data.Batch`.
        loss_weights: float32 `[B, T]`.
        segment_ids: int `[B, T]`; None: each row is one text.
        start: Targets before this column don't count.
    """
    inputs, targets, weights = (mx.array(x) for x in (tokens[:, :-1], tokens[:, start + 1 :], loss_weights[:, start:]))
    if isinstance(model, Decoder):
        options = {} if segment_ids is None else {"segment_ids": mx.array(segment_ids)}
        hidden = model.model(inputs, **options)[:, start:].flatten(0, 1)
        return _sum_nll_of_hidden(model, hidden, targets.flatten(), weights.flatten())
    rows = (model(inputs[i : i + 1])[0, start:] for i in range(len(inputs)))
    losses = (cross_entropy(logits, targets[i]) * weights[i] for i, logits in enumerate(rows))
    return math.fsum(_value(loss.sum()) for loss in losses)


def _sum_nll_of_hidden(model: Decoder, hidden: mx.array, targets: mx.array, weights: mx.array) -> float:
    """The same for hidden states `[N, hidden_size]`, with targets and weights `[N]`."""
    head = model.model.embed_tokens if model.config.tie_word_embeddings else model.lm_head
    if "scales" not in head:
        return _value(
            linear_cross_entropy(hidden, model.head_weight, targets, weights, softcap=model.final_logit_softcap)
        )
    parts = (slice(first, first + _POSITIONS) for first in range(0, len(hidden), _POSITIONS))
    return math.fsum(_value((cross_entropy(model.head(hidden[p]), targets[p]) * weights[p]).sum()) for p in parts)


def _value(scalar: mx.array) -> float:
    eval_arrays(scalar)
    return scalar.item()
