"""How well a model predicts a text: loss, perplexity, bits per byte."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlxlm.data import TokenDataset, validation_batches
from mlxlm.evaluate.losses import perplexity, sum_nll


@dataclass(frozen=True)
class Evaluation:
    """`loss` in nats per token; `tokens` is how many were predicted."""

    loss: float
    bits_per_byte: float
    tokens: int

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss)


def evaluate_dataset(
    model,
    data: TokenDataset,
    max_seq_length: int,
    batch_size: int = 8,
    max_tokens: int | None = None,
    *,
    document_mask: bool = False,
    mask_prompt: bool = False,
) -> Evaluation:
    """Predict each token of `data` once, in windows of `max_seq_length`; or `max_tokens` of them, in windows
    spread evenly over it. `document_mask` and `mask_prompt`: see `mlxlm.data.validation_batches`.

    Bits per byte = loss / ln 2 · (tokens / bytes of all of `data`): unlike a loss per token it can be compared
    between tokenizers. Special tokens count as tokens and have no bytes; of conversations only the answers count. The
    model is left in the mode it was in.
    """
    training = model.training
    model.eval()
    total, count = 0.0, 0.0
    form = {"document_mask": document_mask, "mask_prompt": mask_prompt}
    try:
        for tokens, segment_ids, weights in validation_batches(data, batch_size, max_seq_length, max_tokens, **form):
            total += sum_nll(model, tokens, weights, segment_ids)
            count += float(weights.sum())
    finally:
        model.train(training)
    loss = total / count
    tokens = data.num_targets() if mask_prompt else len(data)
    return Evaluation(loss, loss / math.log(2) * tokens / data.bytes, int(count))
