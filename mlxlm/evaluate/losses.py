"""How evaluations sum losses: one way for all of them."""

from __future__ import annotations

import math

import numpy as np

from mlxlm.backend.mlx import eval_arrays, mx
from mlxlm.kernels import cross_entropy, linear_cross_entropy
from mlxlm.model import Decoder

_ROWS = 512  # positions whose logits a quantized head makes at once: 256 MB for 128k tokens


def perplexity(loss: float) -> float:
    """exp(loss), infinite where that overflows."""
    return math.exp(loss) if loss < 700 else math.inf


def sum_nll(
    model, tokens: np.ndarray, weights: np.ndarray, segment_ids: np.ndarray | None = None, *, start: int = 0
) -> float:
    """Nats over the targets of a batch, each counted by its weight.

    tokens int `[B, T + 1]`, weights float32 `[B, T]`, segments int `[B, T]` or None: see `mlxlm.data.Batch`. `start`:
    no target before this column counts. The logits of a `Decoder` never exist whole; a model that can only be called
    makes those of one row at a time.
    """
    inputs, targets, counts = (mx.array(x) for x in (tokens[:, :-1], tokens[:, start + 1 :], weights[:, start:]))
    within = {} if segment_ids is None else {"segment_ids": mx.array(segment_ids)}
    if isinstance(model, Decoder):
        hidden = model.model(inputs, **within)[:, start:].flatten(0, 1)
        return _of_hidden(model, hidden, targets.flatten(), counts.flatten())
    rows = (model(inputs[i : i + 1])[0, start:] for i in range(len(inputs)))
    losses = (cross_entropy(logits, targets[i]) * counts[i] for i, logits in enumerate(rows))
    return math.fsum(_value(loss.sum()) for loss in losses)


def _of_hidden(model: Decoder, hidden: mx.array, targets: mx.array, weights: mx.array) -> float:
    """hidden `[N, hidden]`, targets and weights `[N]`"""
    head = model.model.embed_tokens if model.config.tie_word_embeddings else model.lm_head
    if "scales" not in head:
        return _value(
            linear_cross_entropy(hidden, model.head_weight, targets, weights, softcap=model.final_logit_softcap)
        )
    cuts = (slice(first, first + _ROWS) for first in range(0, len(hidden), _ROWS))
    return math.fsum(_value((cross_entropy(model.head(hidden[c]), targets[c]) * weights[c]).sum()) for c in cuts)


def _value(sum_: mx.array) -> float:
    eval_arrays(sum_)
    return sum_.item()
