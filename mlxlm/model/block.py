"""A decoder layer: attention and feed-forward with their norms and residual connections."""

from __future__ import annotations

from typing import Any

from mlxlm.backend.mlx import mx, nn
from mlxlm.config import ModelConfig
from mlxlm.model.attention import Attention
from mlxlm.model.dropout import Dropout
from mlxlm.model.feed_forward import FeedForward
from mlxlm.model.norms import add_norm, make_norm


class Block(nn.Module):
    """A decoder layer.

    A residual addition is deferred to the norm that follows it, so that one pass over memory does both.

    Args:
        config: The model's configuration.
        layer: Index of the layer.
        dropout: Probability of dropout on the output of each sublayer.
    """

    def __init__(self, config: ModelConfig, layer: int, dropout: float = 0.0):
        super().__init__()
        self.norms, self.parallel = config.layer_norms, config.parallel_residual
        for name in self.norms.names:
            setattr(self, name, make_norm(config))
        self.self_attn = Attention(config, layer)
        self.mlp = FeedForward(config)
        self.dropout = Dropout(dropout)

    def __call__(
        self, residual: mx.array, hidden_states: mx.array | None, cache: Any = None, segment_ids: mx.array | None = None
    ) -> tuple[mx.array, mx.array | None]:
        """Apply the layer.

        Args:
            residual: `[B, T, hidden]`, or `[B, hidden]` in a decoding step (`Decoder.decode`).
            hidden_states: Output of the layer before, not yet added to `residual`. None for the first layer, and with
                post-norm.
            cache: A key-value cache.
            segment_ids: See `Attention`.

        Returns:
            The residual, and this layer's output, which is yet to be added. None with post-norm, which adds it.
        """
        norms = self.norms
        if norms.after_addition:  # Vaswani et al. 2017, section 3.1
            hidden_states = self.dropout(self.self_attn(residual, cache, segment_ids))
            residual = add_norm(self[norms.attention_output], residual, hidden_states)[1]
            return add_norm(self[norms.mlp_output], residual, self.dropout(self.mlp(residual)))[1], None
        residual, x = add_norm(self.get(norms.attention_input), residual, hidden_states)
        hidden_states = self._sublayer_output(self.self_attn(x, cache, segment_ids), norms.attention_output)
        if self.parallel:
            x = x if norms.mlp_input is None else self[norms.mlp_input](residual)
            return residual, hidden_states + self._sublayer_output(self.mlp(x), norms.mlp_output)
        residual, x = add_norm(self.get(norms.mlp_input), residual, hidden_states)
        return residual, self._sublayer_output(self.mlp(x), norms.mlp_output)

    def _sublayer_output(self, hidden_states: mx.array, norm: str | None) -> mx.array:
        """Apply the norm of a sublayer's output, if there is one, and dropout."""
        return self.dropout(hidden_states if norm is None else self[norm](hidden_states))
