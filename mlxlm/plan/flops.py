"""Floating-point operations of training, by part, and how their shares move with the length of the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxlm.config import ModelConfig, counts
from mlxlm.plan import textbook
from mlxlm.plan.training import Training

ATTENTION_PARTS = ("scores", "scores_values")  # the work that grows with the square of the length


@dataclass(frozen=True)
class Flops:
    """Operations for one token of a sequence, 2 for each multiply-add; products alone are counted.

    forward: by part, every token's row of scores having as many keys as the sequence has tokens (or as the layer's
    window): the convention of the literature, and what is computed where nothing skips the hidden half. causal: the
    two attention parts with only the keys that a token sees. backward: twice the forward pass (one product for the
    gradient of each factor). recomputed: the layers' forward pass once more, where they are recomputed.
    rule_of_thumb: 6 for each parameter, 8 with recomputation. tokens_per_step: of all devices. done: the share of those scores
    that our own attention computes (see `Training.keys_computed`): above 1 where it has more keys than a window.
    """

    forward: dict[str, float]
    causal: float
    recomputed: float
    rule_of_thumb: float
    tokens_per_step: int
    computed_fraction: float = 1.0

    @property
    def forward_total(self) -> float:
        return sum(self.forward.values())

    @property
    def attention(self) -> float:
        """Of the forward pass: scores, and scores times values."""
        return sum(self.forward[part] for part in ATTENTION_PARTS)

    @property
    def backward(self) -> float:
        return 2 * self.forward_total

    @property
    def per_token(self) -> float:
        """Forward, backward, and what is recomputed."""
        return self.forward_total + self.backward + self.recomputed

    @property
    def per_step(self) -> float:
        return self.per_token * self.tokens_per_step

    @property
    def computed_per_step(self) -> float:
        """Without the scores that nothing computes; where probabilities aren't kept, scores are computed twice, which
        no count has."""
        passes = 4 if self.recomputed else 3
        return self.per_step - (1 - self.computed_fraction) * passes * self.attention * self.tokens_per_step


def count_training_flops(config: ModelConfig, training: Training, num_devices: int = 1) -> Flops:
    """What training on one token of a sequence takes; a step has the tokens of all `num_devices`."""
    length = training.max_seq_length
    keys = counts.attended_keys(config, length)
    forward = counts.forward_flops(config, keys)
    seen = counts.forward_flops(config, counts.mean_attended_keys(config, length))
    return Flops(
        forward=forward,
        causal=sum(seen[part] for part in ATTENTION_PARTS),
        recomputed=sum(forward.values()) - forward["head"] if training.grad_checkpoint else 0.0,
        rule_of_thumb=textbook.training_flops(config.parameter_count(), 1, training.grad_checkpoint),
        tokens_per_step=training.tokens_per_step * num_devices,
        computed_fraction=training.keys_computed(config) * config.num_hidden_layers / keys,
    )


@dataclass(frozen=True)
class FlopsByLength:
    """Shares of the forward operations by part, at each length; `total` is operations for the whole sequence."""

    lengths: tuple[int, ...]
    shares: tuple[dict[str, float], ...]
    total: tuple[float, ...]


def flops_by_length(config: ModelConfig, lengths: Sequence[int] = tuple(1 << n for n in range(9, 18))) -> FlopsByLength:
    """How the forward pass divides into its parts for texts from 512 to 131,072 tokens, the full square counted."""
    found = [counts.forward_flops(config, counts.attended_keys(config, length)) for length in lengths]
    totals = [sum(parts.values()) for parts in found]
    shares = tuple(
        {name: part / total for name, part in parts.items()} for parts, total in zip(found, totals, strict=True)
    )
    return FlopsByLength(tuple(lengths), shares, tuple(n * total for n, total in zip(lengths, totals, strict=True)))
