"""One layer: attention and feed-forward, their norms, and how they join the residual stream."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from mlxlm.backend.mlx import mx, nn
from mlxlm.config import ModelConfig
from mlxlm.model.attention import Attention
from mlxlm.model.dropout import Dropout
from mlxlm.model.feed_forward import FeedForward
from mlxlm.model.norms import enter, make_norm


@dataclass(frozen=True)
class Places:
    """The norms of a layer by Hugging Face's names, None where there is none."""

    before_attention: str | None
    after_attention: str | None
    before_mlp: str | None
    after_mlp: str | None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in astuple(self) if name is not None)


# "post attention" is the norm before the feed-forward in Llama, and that of attention's output in OLMo 2 and Gemma 2.
_PLACES = {
    "pre": Places("input_layernorm", None, "post_attention_layernorm", None),
    # On the stream, after the addition, or on what is added.
    "post": Places(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "output": Places(None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "both": Places(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
}
_SHARED = Places("input_layernorm", None, None, None)  # one norm for both sublayers


class Block(nn.Module):
    """Layer number `layer` of a decoder. An addition waits for the norm that follows it, so that one pass over
    memory does both."""

    def __init__(self, config: ModelConfig, layer: int, dropout: float = 0.0):
        super().__init__()
        self.places = _SHARED if config.shared_norm else _PLACES[config.norm_placement]
        self.parallel, self.on_stream = config.parallel_residual, config.norm_placement == "post"
        for name in self.places.names:
            setattr(self, name, make_norm(config))
        self.self_attn = Attention(config, layer)
        self.mlp = FeedForward(config)
        self.dropout = Dropout(dropout)

    def __call__(
        self, stream: mx.array, update: mx.array | None, cache=None, segments: mx.array | None = None
    ) -> tuple[mx.array, mx.array | None]:
        """The stream and what the layer before adds to it -> the stream and what this one adds to it, None where
        norms are on the stream, which then has it already.

        `segments`: see `Attention`.
        """
        places = self.places
        if self.on_stream:  # (Vaswani et al. 2017, 3.1)
            stream, x = enter(None, stream, update)
            stream = self._join(stream, self.self_attn(x, cache, segments), places.after_attention)
            return self._join(stream, self.mlp(stream), places.after_mlp), None
        stream, x = enter(self.get(places.before_attention), stream, update)
        update = self._leave(self.self_attn(x, cache, segments), places.after_attention)
        if self.parallel:
            x = x if places.before_mlp is None else self[places.before_mlp](stream)
            return stream, update + self._leave(self.mlp(x), places.after_mlp)
        stream, x = enter(self.get(places.before_mlp), stream, update)
        return stream, self._leave(self.mlp(x), places.after_mlp)

    def _join(self, stream: mx.array, update: mx.array, norm: str) -> mx.array:
        """The norm of the stream with a sublayer's output added."""
        return self[norm].add(self.dropout(update), stream)[1]

    def _leave(self, update: mx.array, norm: str | None) -> mx.array:
        """What a sublayer adds to the stream."""
        return self.dropout(update if norm is None else self[norm](update))
