"""How well a model predicts a text: loss, perplexity, bits per byte."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlxlm import platform
from mlxlm._mlx import mx
from mlxlm.data import TokenDataset, validation_batches
from mlxlm.kernels import cross_entropy


@dataclass(frozen=True)
class Evaluation:
    """`loss` in nats per token; `tokens` is how many were predicted."""

    loss: float
    bits_per_byte: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp(loss), infinite where that overflows."""
        return math.exp(self.loss) if self.loss < 700 else math.inf


def evaluate(
    model, data: TokenDataset, sequence_length: int, batch_size: int = 8, max_tokens: int | None = None
) -> Evaluation:
    """Predict each token of `data` once, in windows of `sequence_length`; or `max_tokens` of them, in windows
    spread evenly over it.

    Bits per byte = loss / ln 2 · (tokens / bytes of all of `data`): unlike a loss per token it can be compared
    between tokenizers. Special tokens count as tokens and have no bytes. The model is left in the mode it
    was in.
    """
    training = model.training
    model.eval()
    total, count = 0.0, 0.0
    try:
        for tokens, mask in validation_batches(data, batch_size, sequence_length, max_tokens):
            inputs, targets = mx.array(tokens[:, :-1]), mx.array(tokens[:, 1:])
            with platform.interrupts_held():
                total += (cross_entropy(model(inputs), targets) * mx.array(mask)).sum().item()
            count += float(mask.sum())
    finally:
        model.train(training)
    loss = total / count
    return Evaluation(loss, loss / math.log(2) * len(data) / data.bytes, int(count))
