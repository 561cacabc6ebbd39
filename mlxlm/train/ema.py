"""An exponential average of the weights, which predicts better than the weights between two noisy steps
(Polyak & Juditsky 1992)."""

from __future__ import annotations

from mlxlm.backend.mlx import mx


def ema_weights(
    averages: dict[str, mx.array], weights: dict[str, mx.array], decay: float, step: mx.array
) -> dict[str, mx.array]:
    """The averages after step number `step` (from 1, a scalar array), by name: d · average + (1 - d) · weight.

    d is `decay`, but at most (1 + step) / (10 + step), so that the first weights are soon forgotten: the average is
    over about the last ninth of the steps until it is over 1 / (1 - decay) of them.
    """
    step = step.astype(mx.float32)
    share = 1 - mx.minimum(decay, (1 + step) / (10 + step))
    return {name: average + share * (weights[name] - average) for name, average in averages.items()}
