"""One layer: attention and feed-forward, their norms, and how they join the residual stream."""

from __future__ import annotations

from mlxlm._mlx import mx, nn
from mlxlm.config import ModelConfig
from mlxlm.model.attention import Attention
from mlxlm.model.feed_forward import FeedForward
from mlxlm.model.norms import enter, make_norm

# Norms before and after attention, before and after feed-forward, by Hugging Face's names. "post attention" is
# the norm before the feed-forward in Llama, and that of attention's output in OLMo 2 and Gemma 2.
_PLACES = {
    "pre": ("input_layernorm", None, "post_attention_layernorm", None),
    "output": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "both": (
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    ),
}  # fmt: skip


class Block(nn.Module):
    """Layer number `layer` of a decoder. An addition waits for the norm that follows it, so that one pass over
    memory does both."""

    def __init__(self, config: ModelConfig, layer: int, dropout: float = 0.0):
        super().__init__()
        self.places = _PLACES[config.norm_placement]
        self.parallel = config.parallel_residual
        for name in self.places:
            if name is not None and not (config.shared_norm and name == "post_attention_layernorm"):
                setattr(self, name, make_norm(config))
        self.self_attn = Attention(config, layer)
        self.mlp = FeedForward(config)
        self.dropout = nn.Dropout(dropout)

    def __call__(self, stream: mx.array, update: mx.array | None, cache=None) -> tuple[mx.array, mx.array]:
        """The stream and what the layer before adds to it -> the stream and what this one adds to it."""
        before_attention, after_attention, before_mlp, after_mlp = (self.get(name) for name in self.places)
        stream, x = enter(before_attention, stream, update)
        update = self.self_attn(x, cache)
        if self.parallel:
            x = x if before_mlp is None else before_mlp(stream)
            return stream, self.dropout(update) + self.dropout(self.mlp(x))
        update = self.dropout(update if after_attention is None else after_attention(update))
        stream, x = enter(before_mlp, stream, update)
        update = self.mlp(x)
        return stream, self.dropout(update if after_mlp is None else after_mlp(update))
