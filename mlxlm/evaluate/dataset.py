"""Evaluates a model on prepared data: loss, perplexity, bits per byte."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mlxlm.backend.mlx import nn
from mlxlm.data import TokenDataset, validation_batches
from mlxlm.evaluate.losses import perplexity, sum_nll


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate_dataset`: `loss` in nats per token; `tokens` is the number of predicted tokens."""

    loss: float
    bits_per_byte: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return perplexity(self.loss)


def evaluate_dataset(
    model: nn.Module,
    data: TokenDataset,
    max_seq_length: int,
    batch_size: int = 8,
    max_tokens: int | None = None,
    *,
    document_mask: bool = False,
    mask_prompt: bool = False,
) -> Evaluation:
    """Predict each token of `data` once, in windows.

    Bits per byte = loss / ln 2 · (tokens / bytes of all of `data`): unlike the loss per token, it can be compared
    between tokenizers. Special tokens count as tokens and have no bytes; in conversations only the answers count.

    Args:
        model: Evaluated in evaluation mode, then set back to its mode.
        data: Prepared tokens.
        max_seq_length: Predicted tokens per window.
        batch_size: Windows per batch.
        max_tokens: Predict at most this many tokens, in windows spread evenly over the data.
        document_mask: See `mlxlm.data.validation_batches`.
        mask_prompt: See `mlxlm.data.validation_batches`.
    """
    training = model.training
    model.eval()
    total, count = 0.0, 0.0
    masks = {"document_mask": document_mask, "mask_prompt": mask_prompt}
    try:
        for batch in validation_batches(data, batch_size, max_seq_length, max_tokens, **masks):
            weights = (
                np.ones_like(batch.tokens[:, 1:], np.float32) if batch.loss_weights is None else batch.loss_weights
            )
            total += sum_nll(model, batch.tokens, weights, batch.segment_ids)
            count += float(weights.sum())
    finally:
        model.train(training)
    loss = total / count
    tokens = data.num_targets() if mask_prompt else len(data)
    return Evaluation(loss, loss / math.log(2) * tokens / data.bytes, int(count))
