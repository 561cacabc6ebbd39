"""The whole decoder: tokens in, logits out."""

from __future__ import annotations

import math

from mlxlm._mlx import mx, nn, tree_flatten
from mlxlm.config import ModelConfig
from mlxlm.model.parts import Block, Embedding, StreamNorm


class Backbone(nn.Module):
    """Embedding, layers and the last norm: tokens `[B, T]` -> hidden states `[B, T, hidden]`."""

    def __init__(self, config: ModelConfig, dropout: float, layers: int):
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Block(config, dropout) for _ in range(layers)]
        self.norm = StreamNorm(config.hidden_size, eps=config.rms_norm_eps)

    def __call__(self, tokens: mx.array, cache=None) -> mx.array:
        stream, update = self.embed(tokens, cache), None
        for layer, layer_cache in zip(self.layers, cache or [None] * len(self.layers), strict=True):
            stream, update = layer(stream, update, layer_cache)
        return self.norm(stream, update)[1]

    def embed(self, tokens: mx.array, cache=None) -> mx.array:
        """tokens `[B, T]` -> what the first layer sees, `[B, T, hidden]`."""
        return self.embed_tokens(tokens)


class Decoder(nn.Module):
    """A Llama-style decoder (Touvron et al. 2023) with Hugging Face's parameter names.

    `dropout` applies to the output of each sublayer, in training mode only. `layers`: how many of the
    configuration's layers are made, None for all; a model that runs layer by layer (`stages`) makes none.
    """

    def __init__(self, config: ModelConfig, dropout: float = 0.0, layers: int | None = None):
        super().__init__()
        self.config = config
        self.model = Backbone(config, dropout, config.num_hidden_layers if layers is None else layers)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def __call__(self, tokens: mx.array, cache=None) -> mx.array:
        """tokens int `[B, T]` -> logits `[B, T, V]`. A cache (one per layer) is advanced by T positions."""
        return self.head(self.model(tokens, cache))

    def head(self, x: mx.array) -> mx.array:
        """The backbone's output `[B, T, hidden]` -> logits `[B, T, V]`."""
        return self.model.embed_tokens.as_linear(x) if self.config.tie_word_embeddings else self.lm_head(x)

    @property
    def layers(self) -> list[Block]:
        return self.model.layers

    def num_parameters(self) -> int:
        """The parameters this model stands for, counted before quantization."""
        return self.config.parameter_count()

    def flops_per_token(self, context: int, training: bool = False) -> int:
        """See `ModelConfig.flops_per_token`."""
        return self.config.flops_per_token(context, training)

    def kv_bytes_per_token(self, bytes_per_value: int = 2) -> int:
        """See `ModelConfig.kv_bytes_per_token`."""
        return self.config.kv_bytes_per_token(bytes_per_value)

    def initialize(self, seed: int) -> None:
        """Fresh weights, a function of `seed` alone.

        Normal with standard deviation 0.5 / sqrt(hidden), which is GPT-2's 0.02 at its width of 768 and
        larger below it. The projections back into the residual stream are divided by sqrt(2·layers), so
        that the stream's variance doesn't grow with depth (Radford et al. 2019, 2.3).
        """
        keys = iter(mx.random.split(mx.random.key(seed), len(tree_flatten(self.parameters()))))
        deviation = 0.5 / math.sqrt(self.config.hidden_size)
        back = deviation / math.sqrt(2 * self.config.num_hidden_layers)
        fresh = []
        for name, weight in tree_flatten(self.parameters()):
            key = next(keys)
            if weight.ndim == 1:
                value = mx.zeros_like(weight) if name.endswith("bias") else mx.ones_like(weight)
            else:
                scale = back if name.endswith(("o_proj.weight", "down_proj.weight")) else deviation
                value = mx.random.normal(weight.shape, scale=scale, key=key)
            fresh.append((name, value))
        self.load_weights(fresh)
