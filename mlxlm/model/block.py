"""One layer: attention and feed-forward, their norms, and how they join the residual stream."""

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
    """The norms of a layer by Hugging Face's names, None where there is none."""

    input_norm: str | None
    attention_output_norm: str | None
    mlp_input_norm: str | None
    mlp_output_norm: str | None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in astuple(self) if name is not None)


# "post attention" is the norm before the feed-forward in Llama, and that of attention's output in OLMo 2 and Gemma 2.
_PLACES = {
    "pre": NormPlacement("input_layernorm", None, "post_attention_layernorm", None),
    # On the stream, after the addition, or on what is added.
    "post": NormPlacement(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "output": NormPlacement(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "both": NormPlacement(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
}
_SHARED = NormPlacement("input_layernorm", None, None, None)  # one norm for both sublayers


class Block(nn.Module):
    """Layer number `layer` of a decoder. An addition waits for the norm that follows it, so that one pass over
    memory does both."""

    def __init__(self, config: ModelConfig, layer: int, dropout: float = 0.0):
        super().__init__()
        self.norm_names = _SHARED if config.shared_norm else _PLACES[config.norm_placement]
        self.parallel, self.post_norm = config.parallel_residual, config.norm_placement == "post"
        for name in self.norm_names.names:
            setattr(self, name, make_norm(config))
        self.self_attn = Attention(config, layer)
        self.mlp = FeedForward(config)
        self.dropout = Dropout(dropout)

    def __call__(
        self, residual: mx.array, hidden_states: mx.array | None, cache=None, segment_ids: mx.array | None = None
    ) -> tuple[mx.array, mx.array | None]:
        """The stream and what the layer before adds to it -> the stream and what this one adds to it, None where
        norms are on the stream, which then has it already.

        `segment_ids`: see `Attention`.
        """
        norm_names = self.norm_names
        if self.post_norm:  # (Vaswani et al. 2017, 3.1)
            residual, x = add_norm(None, residual, hidden_states)
            residual = self._join(residual, self.self_attn(x, cache, segment_ids), norm_names.attention_output_norm)
            return self._join(residual, self.mlp(residual), norm_names.mlp_output_norm), None
        residual, x = add_norm(self.get(norm_names.input_norm), residual, hidden_states)
        hidden_states = self._leave(self.self_attn(x, cache, segment_ids), norm_names.attention_output_norm)
        if self.parallel:
            x = x if norm_names.mlp_input_norm is None else self[norm_names.mlp_input_norm](residual)
            return residual, hidden_states + self._leave(self.mlp(x), norm_names.mlp_output_norm)
        residual, x = add_norm(self.get(norm_names.mlp_input_norm), residual, hidden_states)
        return residual, self._leave(self.mlp(x), norm_names.mlp_output_norm)

    def _join(self, residual: mx.array, hidden_states: mx.array, norm: str) -> mx.array:
        """The norm of the stream with a sublayer's output added."""
        return self[norm].add(self.dropout(hidden_states), residual)[1]

    def _leave(self, hidden_states: mx.array, norm: str | None) -> mx.array:
        """What a sublayer adds to the stream."""
        return self.dropout(hidden_states if norm is None else self[norm](hidden_states))
