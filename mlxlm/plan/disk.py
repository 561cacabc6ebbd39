"""Room on the disk for a run and its data."""

from __future__ import annotations

from dataclasses import dataclass

from mlxlm.config import ModelConfig
from mlxlm.plan.memory import optimizer_bytes
from mlxlm.plan.training import Training

CHECKPOINTS_KEPT = (
    2 + 1
)  # checkpoints: the last ones that `pretrain --save-total-limit` leaves, and the best (a spike may keep one more)


@dataclass(frozen=True)
class DiskUsage:
    """Bytes: one checkpoint (weights and optimizer in float32, averaged weights), those that stay, the shards of
    tokens, and the finished model in 16 bits."""

    checkpoint: int
    checkpoints: int
    shards: int
    model: int

    @property
    def total(self) -> int:
        return self.checkpoints + self.shards + self.model


def estimate_disk(config: ModelConfig, training: Training, data_tokens: float) -> DiskUsage:
    """`data_tokens`: of the text, each seen once or more; a token takes 2 bytes where the vocabulary fits, else 4."""
    count = config.parameter_count()
    one = 4 * count * (2 if training.ema_decay else 1) + optimizer_bytes(config, training.optimizer)
    shards = round(data_tokens) * (2 if config.vocab_size <= 1 << 16 else 4)
    return DiskUsage(one, CHECKPOINTS_KEPT * one, shards, 2 * count)
