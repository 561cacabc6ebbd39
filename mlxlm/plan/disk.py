"""Disk space of a run and its data."""

from __future__ import annotations

from dataclasses import dataclass

from mlxlm.config import ModelConfig
from mlxlm.plan.memory import optimizer_bytes
from mlxlm.plan.training import Training

# The last two (the default of `--save-total-limit`) and the best. A loss spike may keep one more.
CHECKPOINTS_KEPT = 3


@dataclass(frozen=True)
class DiskUsage:
    """Disk space, in bytes.

    Attributes:
        checkpoint: One checkpoint: weights, optimizer state and averaged weights, in float32.
        checkpoints: All checkpoints that are kept.
        shards: The tokenized text.
        model: The finished model in 16 bits.
    """

    checkpoint: int
    checkpoints: int
    shards: int
    model: int

    @property
    def total(self) -> int:
        """Bytes of all of it."""
        return self.checkpoints + self.shards + self.model


def estimate_disk(config: ModelConfig, training: Training, data_tokens: float) -> DiskUsage:
    """Estimate the disk space of a run on a text of `data_tokens` tokens (2 bytes each; 4 for large vocabularies)."""
    count = config.parameter_count()
    checkpoint = 4 * count * (2 if training.ema_decay else 1) + optimizer_bytes(config, training.optimizer)
    shards = round(data_tokens) * (2 if config.vocab_size <= 1 << 16 else 4)
    return DiskUsage(checkpoint, CHECKPOINTS_KEPT * checkpoint, shards, 2 * count)
