"""What a run learns, by the setting `loss`: the loss of a step, the batches of training, and the validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from mlxlm.backend.process_group import ProcessGroup
from mlxlm.data import TokenDataset, TrainBatches
from mlxlm.data.pairs import REFERENCE_FILE, PairBatches, PairDataset
from mlxlm.evaluate import evaluate_dataset
from mlxlm.evaluate.loss import perplexity
from mlxlm.model import Decoder
from mlxlm.train.distillation import (
    distillation_loss,
    evaluate_distillation,
    loss_of_quantized,
    quantized_weights,
)
from mlxlm.train.grpo import grpo_loss
from mlxlm.train.preference_losses import preference_loss
from mlxlm.train.preferences import evaluate_pairs
from mlxlm.train.settings import TrainSettings
from mlxlm.train.step import Loss, cross_entropy_loss
from mlxlm.utils.errors import DataError


@dataclass(frozen=True)
class ValidationResult:
    """The result of a validation.

    Attributes:
        loss: The loss that is trained; cross-entropy in nats per token.
        token_loss: Cross-entropy in nats per token, of preferences that of the chosen answers.
        bits_per_byte: The same in bits per byte.
        metrics: Metrics of the loss by name.
    """

    loss: float
    token_loss: float
    bits_per_byte: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def perplexity(self) -> float:
        """exp(token_loss)."""
        return perplexity(self.token_loss)


def make_loss(settings: TrainSettings) -> Loss:
    """Return the loss of a run with these settings."""
    if settings.grpo is not None:
        return partial(grpo_loss, temperature=settings.grpo.temperature)
    if settings.has_pairs:
        loss = preference_loss(settings.loss, settings.beta)
    else:
        loss = cross_entropy_loss if settings.teacher is None else distillation_loss(settings)
    return loss if settings.quantization is None else loss_of_quantized(loss, settings.quantization)


def open_batches(data: Path, settings: TrainSettings, process_group: ProcessGroup | None = None) -> TrainBatches:
    """Open the training batches of a run with prepared `data`, or this rank's share of them.

    Raises:
        DataError: The data can't be used.
        PlatformError: The ranks can't share a step's batches equally.
    """
    group = process_group or ProcessGroup()
    options: dict[str, Any] = {
        "batch_size": settings.batch_size,
        "max_seq_length": settings.max_seq_length,
        "seed": settings.seed,
        "rank": group.rank,
        "num_processes": group.size,
        "batches_per_step": group.batches_per_process(settings.grad_accumulation_steps),
    }
    if settings.has_pairs:
        pairs = PairDataset.open(data, "train")
        if settings.loss != "orpo" and pairs.reference_logps is None:
            raise DataError(f"{data / REFERENCE_FILE} is gone", "a complete copy of the folder, or a new run")
        return PairBatches(pairs, **options)
    masks = {"document_mask": settings.document_mask, "mask_prompt": settings.mask_prompt}
    return TrainBatches(TokenDataset.open(data, "train"), packing=settings.packing, **masks, **options)


def open_validation(data: Path, settings: TrainSettings) -> TokenDataset:
    """Open the validation part of prepared `data`. Raises DataError if it can't be used."""
    return (PairDataset if settings.has_pairs else TokenDataset).open(data, "validation")


def validate(
    model: Decoder, data: TokenDataset, settings: TrainSettings, batch_size: int, max_tokens: int
) -> ValidationResult:
    """Measure the loss on validation data.

    Args:
        model: Evaluated in evaluation mode, then set back to its mode.
        data: From `open_validation`.
        settings: Settings of the run.
        batch_size: Rows per forward pass.
        max_tokens: At most about as many targets, spread evenly over the data.
    """
    sizes = settings.max_seq_length, batch_size, max_tokens
    masks = {"document_mask": settings.document_mask, "mask_prompt": settings.mask_prompt}
    with quantized_weights(model, settings.quantization):
        if isinstance(data, PairDataset):
            return ValidationResult(*evaluate_pairs(model, data, make_loss(settings), *sizes))
        if settings.teacher is not None:
            loss = distillation_loss(settings, training=False)
            return ValidationResult(*evaluate_distillation(model, data, loss, *sizes, **masks))
        result = evaluate_dataset(model, data, *sizes, **masks)
    return ValidationResult(result.loss, result.loss, result.bits_per_byte)
