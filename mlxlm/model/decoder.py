"""The decoder: tokens in, logits out."""

from __future__ import annotations

import math
from typing import Any

from mlxlm.backend.mlx import mx, nn, tree_flatten
from mlxlm.config import ModelConfig
from mlxlm.model.block import Block
from mlxlm.model.dropout import Dropout
from mlxlm.model.embedding import Embedding, SinusoidalPositions, packed_position_ids, position_ids
from mlxlm.model.grad_checkpoint import checkpointed_layer
from mlxlm.model.linear import Linear
from mlxlm.model.norms import add_norm, make_norm


class Backbone(nn.Module):
    """Embedding, layers and the final norm: tokens `[B, T]` to hidden states `[B, T, hidden]`.

    Attributes:
        grad_checkpoint: In training mode, keep only the inputs of each layer and recompute the rest for the gradient.
    """

    def __init__(self, config: ModelConfig, dropout: float, layers: int):
        super().__init__()
        self.grad_checkpoint = False
        self.multiplier = float(config.embedding_multiplier)
        self.longest, self.position_offset = config.max_position_embeddings, config.position_offset
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        if config.positions == "learned":
            self.embed_positions = Embedding(self.longest + self.position_offset, config.hidden_size)
        elif config.positions == "sinusoidal":
            self.embed_positions = SinusoidalPositions(self.longest + self.position_offset, config.hidden_size)
        if config.embedding_norm:
            self.embed_layernorm = make_norm(config)
        self.layers = [Block(config, i, dropout) for i in range(layers)]
        if not config.layer_norms.after_addition:  # there the last layer's output is a norm's
            self.norm = make_norm(config)
        self.dropout = Dropout(dropout)

    def embed(self, tokens: mx.array, offset: int | mx.array = 0, segment_ids: mx.array | None = None) -> mx.array:
        """Embed tokens.

        Args:
            tokens: int `[B, T]`, or `[B]` in a decoding step.
            offset: Position of the first token, or int `[B]` with one for each row.
            segment_ids: int `[B, T]`. Positions start at 0 for each document of a row.

        Returns:
            The residual before the first layer, `[B, T, hidden]`.
        """
        residual = self.embed_tokens(tokens)
        if self.multiplier != 1:
            residual = residual * self.multiplier
        if "embed_positions" in self:
            if tokens.ndim == 1:
                positions = offset
            elif segment_ids is None:
                positions = position_ids(offset, tokens.shape[1], self.longest)
            else:
                positions = packed_position_ids(segment_ids)
            residual = residual + self.embed_positions(positions + self.position_offset).astype(residual.dtype)
        return self.dropout(self.embed_layernorm(residual) if "embed_layernorm" in self else residual)

    def __call__(self, tokens: mx.array, cache: Any = None, *, segment_ids: mx.array | None = None) -> mx.array:
        """Return the hidden states `[B, T, hidden]` after the final norm. See `Decoder` for the arguments."""
        if cache and segment_ids is not None:
            raise ValueError("segment_ids can't be used with a cache")
        residual, hidden_states = self.embed(tokens, cache[0].offset if cache else 0, segment_ids), None
        checkpointed = self.grad_checkpoint and self.training and not cache
        for layer, layer_cache in zip(self.layers, cache or [None] * len(self.layers), strict=True):
            if checkpointed:
                residual, hidden_states = checkpointed_layer(layer, residual, hidden_states, segment_ids)
            else:
                residual, hidden_states = layer(residual, hidden_states, layer_cache, segment_ids)
        return self.final_norm(residual, hidden_states)

    def final_norm(self, residual: mx.array, hidden_states: mx.array | None) -> mx.array:
        """Add the last layer's output to the residual and apply the final norm: `[B, T, hidden]`."""
        return add_norm(self.get("norm"), residual, hidden_states)[1]


class Decoder(nn.Module):
    """A decoder of any architecture that the configuration describes (Llama: Touvron et al. 2023).

    Parameters have the names of Hugging Face's Llama.

    Args:
        config: The model's configuration.
        dropout: Probability of dropout on the embeddings and on the output of each sublayer (Vaswani et al. 2017,
            section 5.4), in training mode. Attention weights have no dropout, so that no kernel must store them.
        layers: Number of layers to build. Defaults to all.
    """

    def __init__(self, config: ModelConfig, dropout: float = 0.0, layers: int | None = None):
        super().__init__()
        self.config = config
        softcap = config.final_logit_softcapping
        self.final_logit_softcap = None if softcap is None else float(softcap)
        self.model = Backbone(config, dropout, config.num_hidden_layers if layers is None else layers)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    def __call__(self, tokens: mx.array, cache: Any = None, *, segment_ids: mx.array | None = None) -> mx.array:
        """Compute the logits.

        Args:
            tokens: int `[B, T]`.
            cache: One key-value cache per layer, which is advanced by T positions.
            segment_ids: int `[B, T]`, ascending in each row: the document of each position in packed rows. Documents
                don't attend to each other, and each starts at position 0.

        Returns:
            Logits `[B, T, V]`.

        Raises:
            ValueError: Both `cache` and `segment_ids` are given.
        """
        return self.head(self.model(tokens, cache, segment_ids=segment_ids))

    def fuse(self) -> None:
        """Fuse the projections of each layer that have the same input, for `decode`.

        Weights become views of fused ones. After weights have been replaced, call it again. `train` undoes it.
        """
        for layer in self.layers:
            layer.self_attn.fuse()
            layer.mlp.fuse()
            mx.clear_cache()  # MLX would keep the separate weights of all layers as freed buffers

    def train(self, mode: bool = True) -> Decoder:
        """Set training mode. Training replaces weights, so the fused ones are forgotten."""
        if mode:
            for layer in self.layers:
                layer.self_attn.unfuse()
                layer.mlp.unfuse()
        return super().train(mode)

    def decode(self, tokens: mx.array, cache: Any) -> mx.array:
        """Compute the logits `[B, V]` of one token per row, int `[B]`, after `fuse`.

        See `mlxlm.generation.decode_step`, which makes the `cache`: it can be compiled.
        """
        return self.head(self.model(tokens, cache))

    def head(self, x: mx.array) -> mx.array:
        """Compute logits `[B, T, V]` from the hidden states `[B, T, hidden]` after the final norm."""
        tied = self.config.tie_word_embeddings
        logits = self.model.embed_tokens.as_linear(x) if tied else self.lm_head(x)
        softcap = self.final_logit_softcap
        return logits if softcap is None else softcap * mx.tanh(logits / softcap)

    @property
    def head_weight(self) -> mx.array:
        """The output matrix `[V, hidden]`, which is the embedding if they are tied. Before quantization only."""
        return (self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head).weight

    @property
    def layers(self) -> list[Block]:
        """The layers, as mlx_lm's models have them."""
        return self.model.layers

    @property
    def longrope_original_length(self) -> int | None:
        """See `ModelConfig.longrope_original_length`."""
        return self.config.longrope_original_length

    @property
    def supports_batching(self) -> bool:
        """Whether sequences of different lengths can be batched: not if RoPE depends on the length."""
        return (self.config.rope_scaling or {}).get("rope_type") not in ("dynamic", "longrope")

    def init_weights(self, seed: int) -> None:
        """Initialize the weights from `seed`.

        Normal with standard deviation 0.5 / sqrt(hidden), which is GPT-2's 0.02 at a hidden size of 768 and larger in
        smaller models. The projections into the residual are divided by sqrt(2·layers), so that its variance doesn't
        grow with depth (Radford et al. 2019, section 2.3).
        """
        keys = iter(mx.random.split(mx.random.key(seed), len(tree_flatten(self.parameters()))))
        deviation = 0.5 / math.sqrt(self.config.hidden_size)
        output_deviation = deviation / math.sqrt(2 * self.config.num_hidden_layers)
        weights = []
        for name, weight in tree_flatten(self.parameters()):
            key = next(keys)
            if weight.ndim == 1:
                from_zero = name.endswith("bias") or self._is_offset(name)
                value = mx.zeros_like(weight) if from_zero else mx.ones_like(weight)
            else:
                scale = output_deviation if name.endswith(("o_proj.weight", "down_proj.weight")) else deviation
                value = mx.random.normal(weight.shape, scale=scale, key=key)
            weights.append((name, value))
        self.load_weights(weights)

    def _is_offset(self, name: str) -> bool:
        """Return whether the norm's scale is weight + 1."""
        return self.config.norm_unit_offset and not name.endswith(("q_norm.weight", "k_norm.weight"))
