"""Floating-point operations of training, by component."""

from __future__ import annotations

from dataclasses import dataclass

from mlxlm.config import ModelConfig
from mlxlm.config.counts import attended_keys, forward_flops, mean_attended_keys
from mlxlm.plan.training import Training

TOKENS_PER_PARAMETER = 20  # compute-optimal (Hoffmann et al. 2022, "Chinchilla", table 3)
ATTENTION_PARTS = ("scores", "scores_values")  # grow with the square of the sequence length


@dataclass(frozen=True)
class Flops:
    """Operations per token, 2 for each multiply-add. Only matrix products are counted.

    Attributes:
        forward: Forward operations by component. Attention is counted with every key of the sequence (or of the
            layer's window), as in the literature, without the saving of a causal mask.
        causal: The attention operations with only the keys that a token attends to.
        recomputed: The layers' forward pass once more, with gradient checkpointing.
        rule_of_thumb: 6 per parameter, 8 with gradient checkpointing.
        tokens_per_step: Tokens of an optimizer step, on all devices.
        computed_fraction: The share of the counted attention scores that are computed (see
            `Training.keys_computed`). Above 1 if blocks have more keys than a window.
    """

    forward: dict[str, float]
    causal: float
    recomputed: float
    rule_of_thumb: float
    tokens_per_step: int
    computed_fraction: float = 1.0

    @property
    def forward_total(self) -> float:
        """Operations of the forward pass."""
        return sum(self.forward.values())

    @property
    def attention(self) -> float:
        """Attention operations of the forward pass: the scores, and scores times values."""
        return sum(self.forward[part] for part in ATTENTION_PARTS)

    @property
    def backward(self) -> float:
        """Operations of the backward pass: one product for the gradient of each factor, twice the forward pass."""
        return 2 * self.forward_total

    @property
    def per_token(self) -> float:
        """Operations of the forward and backward pass, and of recomputation."""
        return self.forward_total + self.backward + self.recomputed

    @property
    def per_step(self) -> float:
        """Operations of an optimizer step."""
        return self.per_token * self.tokens_per_step

    @property
    def computed_per_step(self) -> float:
        """Operations of a step with only the scores that are computed.

        Recomputation of scores by attention that doesn't keep the probabilities isn't counted.
        """
        passes = 4 if self.recomputed else 3
        return self.per_step - (1 - self.computed_fraction) * passes * self.attention * self.tokens_per_step


def count_training_flops(config: ModelConfig, training: Training, num_devices: int = 1) -> Flops:
    """Count the operations of training on one token. A step has the tokens of all `num_devices`."""
    length = training.max_seq_length
    keys = attended_keys(config, length)
    forward = forward_flops(config, keys)
    causal = forward_flops(config, mean_attended_keys(config, length))
    return Flops(
        forward=forward,
        causal=sum(causal[part] for part in ATTENTION_PARTS),
        recomputed=sum(forward.values()) - forward["head"] if training.grad_checkpoint else 0.0,
        rule_of_thumb=(8 if training.grad_checkpoint else 6) * config.active_parameter_count(),
        tokens_per_step=training.tokens_per_step * num_devices,
        computed_fraction=training.keys_computed(config) * config.num_hidden_layers / keys,
    )
