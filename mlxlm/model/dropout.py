"""Dropout whose masks can be drawn a second time."""

from __future__ import annotations

from mlxlm.backend.mlx import mx, nn


class Dropout(nn.Module):
    """Dropout (Srivastava et al. 2014) in training mode only: each value is 0 with `probability`, else divided by
    1 - probability.

    After `begin(key)` the masks follow from `key`, in the order of the calls; before it they come from MLX's global
    random state.
    """

    def __init__(self, probability: float):
        super().__init__()
        self.probability = probability
        self._key: mx.array | None = None

    @property
    def active(self) -> bool:
        return self.training and self.probability > 0

    def set_key(self, key: mx.array | None) -> None:
        """Draw the next masks from `key` uint32 `[2]`; None: from the global state again."""
        self._key = key

    def __call__(self, x: mx.array) -> mx.array:
        if not self.active:
            return x
        own = self._key
        if own is not None:
            own, self._key = mx.random.split(own)
        kept = mx.random.bernoulli(1 - self.probability, x.shape, key=own)
        return kept * x * (1 / (1 - self.probability))
