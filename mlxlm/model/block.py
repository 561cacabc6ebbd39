"""A decoder layer: attention and feed-forward with their norms and residual connections."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from mlxlm.backend.mlx import mx, nn
from mlxlm.config import ModelConfig
from mlxlm.model.attention import Attention
from mlxlm.model.dropout import Dropout
from mlxlm.model.feed_forward import FeedForward
from mlxlm.model.norms import add_norm, make_norm


@dataclass(frozen=True)
class NormPlacement:
    """The names of a layer's norms, as in Hugging Face's models. None for a norm that the layer doesn't have."""

    input_norm: str | None
    attention_output_norm: str | None
    mlp_input_norm: str | None
    mlp_output_norm: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """The norms that the layer has."""
        return tuple(name for name in astuple(self) if name is not None)


# "post_attention_layernorm" is the norm before the feed-forward in Llama, and of attention's output in OLMo 2, Gemma 2.
_NORM_PLACEMENTS = {
    "pre": NormPlacement("input_layernorm", None, "post_attention_layernorm", None),
    # "post" normalizes the residual after the addition, "output" the sublayer's output before it.
    "post": NormPlacement(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "output": NormPlacement(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "both": NormPlacement(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
}
_SHARED_NORM = NormPlacement("input_layernorm", None, None, None)  # one norm for both sublayers


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
        self.norm_names = _SHARED_NORM if config.shared_norm else _NORM_PLACEMENTS[config.norm_placement]
        self.parallel, self.post_norm = config.parallel_residual, config.norm_placement == "post"
        for name in self.norm_names.names:
            setattr(self, name, make_norm(config))
        self.self_attn = Attention(config, layer)
        self.mlp = FeedForward(config)
        self.dropout = Dropout(dropout)

    def __call__(
        self, residual: mx.array, hidden_states: mx.array | None, cache=None, segment_ids: mx.array | None = None
    ) -> tuple[mx.array, mx.array | None]:
        """Apply the layer.

        Args:
            residual: `[B, T, hidden]`.
            hidden_states: Output of the layer before, not yet added to `residual`. None for the first layer, and with
                post-norm.
            cache: A key-value cache.
            segment_ids: See `Attention`.

        Returns:
            The residual, and this layer's output, which is yet to be added. None with post-norm, which adds it.
        """
        norm_names = self.norm_names
        if self.post_norm:  # Vaswani et al. 2017, section 3.1
            residual, x = add_norm(None, residual, hidden_states)
            residual = self._add_and_norm(
                residual, self.self_attn(x, cache, segment_ids), norm_names.attention_output_norm
            )
            return self._add_and_norm(residual, self.mlp(residual), norm_names.mlp_output_norm), None
        residual, x = add_norm(self.get(norm_names.input_norm), residual, hidden_states)
        hidden_states = self._sublayer_output(self.self_attn(x, cache, segment_ids), norm_names.attention_output_norm)
        if self.parallel:
            x = x if norm_names.mlp_input_norm is None else self[norm_names.mlp_input_norm](residual)
            return residual, hidden_states + self._sublayer_output(self.mlp(x), norm_names.mlp_output_norm)
        residual, x = add_norm(self.get(norm_names.mlp_input_norm), residual, hidden_states)
        return residual, self._sublayer_output(self.mlp(x), norm_names.mlp_output_norm)

    def _add_and_norm(self, residual: mx.array, hidden_states: mx.array, norm: str) -> mx.array:
        """Add a sublayer's output to the residual and normalize the sum."""
        return self[norm].add_norm(self.dropout(hidden_states), residual)[1]

    def _sublayer_output(self, hidden_states: mx.array, norm: str | None) -> mx.array:
        """Apply the norm of a sublayer's output, if there is one, and dropout."""
        return self.dropout(hidden_states if norm is None else self[norm](hidden_states))
