"""Dropout with reproducible masks, for gradient checkpointing."""

from __future__ import annotations

from mlxlm.backend.mlx import mx, nn


class Dropout(nn.Module):
    """Dropout (Srivastava et al. 2014), in training mode only.

    Each value is 0 with `probability`, and divided by 1 - probability otherwise. After `set_key(key)` the masks are
    drawn from `key`, in the order of the calls; before, from MLX's global random state.
    """

    def __init__(self, probability: float):
        super().__init__()
        self.probability = probability
        self._key: mx.array | None = None

    @property
    def active(self) -> bool:
        """Whether calls drop values."""
        return self.training and self.probability > 0

    def set_key(self, key: mx.array | None) -> None:
        """Draw the next masks from `key`, uint32 `[2]`, or from the global random state for None."""
        self._key = key

    def __call__(self, x: mx.array) -> mx.array:
        """Apply dropout to `x`."""
        if not self.active:
            return x
        key = self._key
        if key is not None:
            key, self._key = mx.random.split(key)
        mask = mx.random.bernoulli(1 - self.probability, x.shape, key=key)
        return mask * x * (1 / (1 - self.probability))
