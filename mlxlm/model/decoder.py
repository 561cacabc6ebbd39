"""The decoder: tokens in, logits out, with token and position embeddings."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from functools import cached_property, partial
from typing import Any

import numpy as np

from mlxlm.backend.mlx import ON_CPU, mx, nn, tree_flatten
from mlxlm.backend.process_group import ProcessGroup
from mlxlm.config import ModelConfig
from mlxlm.config.mup import mup_factors
from mlxlm.kernels import linear_cross_entropy
from mlxlm.model.block import Block, Dropout, checkpointed_layer, layer_caches
from mlxlm.model.linear import Linear, multiply
from mlxlm.model.norms import add_norm, make_norm
from mlxlm.model.positions import packed_position_ids, position_ids
from mlxlm.utils.errors import GenerationError


class Embedding(nn.Embedding):
    """Token embeddings whose gradient is summed in float32, in a fixed order."""

    def __call__(self, tokens: mx.array) -> mx.array:
        """Look up `tokens`, int `[B, T]`: `[B, T, hidden]`."""
        return lookup(self.weight, tokens)

    def to_quantized(self, group_size: int, bits: int, mode: str = "affine", **_options: Any) -> QuantizedEmbedding:
        """Quantize the table."""
        return QuantizedEmbedding.from_embedding(self, group_size, bits, mode)


class QuantizedEmbedding(nn.QuantizedEmbedding):
    """`Embedding` with a quantized table."""

    def __call__(self, tokens: mx.array) -> mx.array:
        """Look up `tokens`, int `[B, T]`: `[B, T, hidden]`; on a CPU float32, without rounding to the scales' dtype."""
        rows = {name: self[name][tokens] for name in ("weight", "scales", "biases") if self.get(name) is not None}
        if ON_CPU and self.mode == "affine":
            rows |= {name: rows[name].astype(mx.float32) for name in ("scales", "biases")}
        return mx.dequantize(*rows.values(), group_size=self.group_size, bits=self.bits, mode=self.mode)

    def as_linear(self, x: mx.array) -> mx.array:
        """Multiply `x` `[..., hidden]` by the transposed table: `[..., V]`."""
        return multiply(self, x)


@mx.custom_function
def lookup(table: mx.array, tokens: mx.array) -> mx.array:
    """Look up rows of `table` `[V, hidden]`.

    The gradient sorts the tokens and sums the rows of each, with one rounding at the end. MLX's own gradient rounds
    after each addition (in bfloat16, 5% of error for 131,072 tokens), on a GPU in any order, and takes four times as
    long on a CPU.
    """
    return table[tokens]


@lookup.vjp
def _lookup_vjp(primals: list[mx.array], cotangent: mx.array, _output: mx.array) -> tuple[mx.array, mx.array]:
    table, tokens = primals
    flat, rows = tokens.flatten(), cotangent.reshape(-1, table.shape[1])
    counts = mx.zeros(table.shape[0], mx.uint32).at[flat].add(mx.array(1, mx.uint32))
    ends = mx.cumsum(counts)
    segments = mx.stack([ends - counts, ends], axis=1)
    sums = mx.segmented_mm(mx.ones((1, flat.size), rows.dtype), rows[mx.argsort(flat)], segments)  # float32 inside
    return sums.reshape(table.shape), mx.zeros_like(tokens)


class SinusoidalPositions(nn.Module):
    """Sinusoidal position embeddings (Vaswani et al. 2017, section 3.5).

    sin(p / 10000^(2i / hidden)) in dimension 2i of position p, and the cosine of the same in 2i + 1. The table of
    `longest` rows is made on first use and isn't a parameter.
    """

    def __init__(self, longest: int, size: int):
        super().__init__()
        self._longest, self._size = longest, size

    @cached_property
    def _table(self) -> mx.array:
        dims = np.arange(self._size)  # in float64: at position 8000 a float32 angle is wrong by 5e-4
        angles = np.arange(self._longest)[:, None] / 10_000.0 ** ((dims - dims % 2) / self._size)
        return mx.array(np.where(dims % 2, np.cos(angles), np.sin(angles)).astype(np.float32))

    def __call__(self, positions: mx.array) -> mx.array:
        """Look up int `[..., T]`: `[..., T, hidden]`, float32."""
        return self._table[positions]


def table_rows(first: int | mx.array, count: int, longest: int) -> mx.array:
    """Return `position_ids` in a table of embeddings, where left padding has position 0.

    Raises:
        GenerationError: A position is beyond the table of `longest` rows. MLX doesn't check indices.
    """
    last = (max(first.tolist()) if isinstance(first, mx.array) else first) + count
    if last > longest:
        raise GenerationError(f"position {last} is beyond the model's {longest} positions", "a shorter text")
    return mx.maximum(position_ids(first, count), 0)


class Backbone(nn.Module):
    """Embedding, layers and the final norm: tokens `[B, T]` to hidden states `[B, T, hidden]`.

    Attributes:
        grad_checkpoint: In training mode, keep only the inputs of each layer and recompute the rest for the gradient.
    """

    def __init__(self, config: ModelConfig, dropout: float, layers: int):
        super().__init__()
        self.grad_checkpoint = False
        self.multiplier, self.logits_scaling = float(config.embedding_multiplier), float(config.logits_scaling)
        self.longest, self.position_offset = config.max_position_embeddings, config.position_offset
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        if config.positions == "learned":
            self.embed_positions = Embedding(self.longest + self.position_offset, config.hidden_size)
        elif config.positions == "sinusoidal":
            self.embed_positions = SinusoidalPositions(self.longest + self.position_offset, config.hidden_size)
        if config.embedding_norm:
            self.embed_layernorm = make_norm(config)
        if config.hidden_size_per_layer_input is not None:
            width, rows = config.per_layer_width, config.vocab_size_per_layer_input or config.vocab_size
            self.per_layer_size = config.hidden_size_per_layer_input
            self.embed_tokens_per_layer = Embedding(rows, width)
            self.per_layer_model_projection = Linear(config.hidden_size, width, bias=False)
            self.per_layer_projection_norm = make_norm(config, self.per_layer_size)
        self.layers = [Block(config, i, dropout) for i in range(layers)]
        self._kv_layers = config.kv_layers[:layers]
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
                positions = table_rows(offset, tokens.shape[1], self.longest)
            else:
                positions = packed_position_ids(segment_ids)
            residual = residual + self.embed_positions(positions + self.position_offset).astype(residual.dtype)
        return self.dropout(self.embed_layernorm(residual) if "embed_layernorm" in self else residual)

    def per_layer_inputs(self, tokens: mx.array, residual: mx.array) -> list[mx.array] | None:
        """Return what each layer gets of each token, `[B, T, P]`, or None if layers get nothing.

        A row of an embedding and a normalized projection of `residual`, the result of `embed`, with the same weight.
        """
        if "embed_tokens_per_layer" not in self:
            return None
        shape = (*tokens.shape, -1, self.per_layer_size)
        looked_up = (self.embed_tokens_per_layer(tokens) * self.per_layer_size**0.5).reshape(shape)
        projected = (self.per_layer_model_projection(residual) * residual.shape[-1] ** -0.5).reshape(shape)
        inputs = (self.per_layer_projection_norm(projected) + looked_up) * 0.5**0.5
        return [x.squeeze(-2) for x in mx.split(inputs, inputs.shape[-2], axis=-2)]

    def __call__(self, tokens: mx.array, cache: Any = None, *, segment_ids: mx.array | None = None) -> mx.array:
        """Return the hidden states `[B, T, hidden]` after the final norm. See `Decoder` for the arguments."""
        [last_state] = deque(self.layer_states(tokens, cache, segment_ids), maxlen=1)
        return self.final_norm(*last_state)

    def layer_states(
        self, tokens: mx.array, cache: Any = None, segment_ids: mx.array | None = None
    ) -> Iterator[tuple[mx.array, mx.array | None]]:
        """Yield the residual `[B, T, hidden]` and what is yet to be added to it, before and after each layer."""
        if cache and segment_ids is not None:
            raise ValueError("segment_ids can't be used with a cache")
        offset = next((one.offset for one in cache or () if hasattr(one, "offset")), 0)  # recurrent layers have none
        residual, hidden_states = self.embed(tokens, offset, segment_ids), None
        yield residual, hidden_states
        inputs = self.per_layer_inputs(tokens, residual) or [None] * len(self.layers)
        checkpointed = self.grad_checkpoint and self.training and not cache
        for layer, *own in zip(self.layers, layer_caches(self._kv_layers, cache), inputs, strict=True):
            apply = partial(checkpointed_layer, layer) if checkpointed else layer
            residual, hidden_states = apply(residual, hidden_states, own[0], segment_ids, own[1])
            yield residual, hidden_states

    def final_norm(self, residual: mx.array, hidden_states: mx.array | None) -> mx.array:
        """Add the last layer's output to the residual and apply the final norm: `[B, T, hidden]`.

        The result is divided by `logits_scaling`, which has the same effect as dividing the logits.
        """
        hidden_states = add_norm(self.get("norm"), residual, hidden_states)[1]
        return hidden_states if self.logits_scaling == 1 else hidden_states / self.logits_scaling


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
        self.process_group: ProcessGroup | None = None
        softcap = config.final_logit_softcapping
        self.final_logit_softcap = None if softcap is None else float(softcap)
        self.model = Backbone(config, dropout, config.num_hidden_layers if layers is None else layers)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=config.head_bias)

    def __call__(self, tokens: mx.array, cache: Any = None, *, segment_ids: mx.array | None = None) -> mx.array:
        """Compute the logits.

        Args:
            tokens: int `[B, T]`.
            cache: The caches of `mlxlm.cache.make_cache`, which are advanced by T positions.
            segment_ids: int `[B, T]`, ascending in each row: the document of each position in packed rows. Documents
                don't attend to each other, and each starts at position 0.

        Returns:
            Logits `[B, T, V]`.

        Raises:
            ValueError: Both `cache` and `segment_ids` are given.
        """
        return self.head(self.model(tokens, cache, segment_ids=segment_ids))

    def split(self, process_group: ProcessGroup, whole: ModelConfig) -> None:
        """Add up the sublayers' outputs over processes, each of which has a part of the heads and of the feed-forward.

        The configuration and the weights are those of this part, see `mlxlm.checkpoint.tensor_parallel`; `whole` is the
        configuration of all parts. The logits are those of the whole model, on all ranks.
        """
        self.process_group = process_group
        for layer in self.layers:
            layer.process_group = process_group
            if hasattr(layer.mixer, "split"):
                layer.mixer.split(process_group, whole)

    def fuse(self) -> None:
        """Fuse the projections of each layer that have the same input, for `decode`.

        Weights become views of fused ones. After weights have been replaced, call it again. `train` undoes it.
        """
        for layer in self.layers:
            layer.fuse()
            mx.clear_cache()  # MLX would keep the separate weights of all layers as freed buffers

    def train(self, mode: bool = True) -> Decoder:
        """Set training mode. Training replaces weights, so the fused ones are forgotten."""
        if mode:
            for layer in self.layers:
                layer.unfuse()
        return super().train(mode)

    def decode(self, tokens: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        """Compute the logits `[..., V]` and the hidden states `[..., hidden]` after the final norm.

        Args:
            tokens: int `[B, T]`; or `[B]`, one per row, after `fuse`: a step that can be compiled.
            cache: The caches of the layers; in a step, those that `mlxlm.generation.decode_step` makes.
        """
        hidden_states = self.model(tokens, cache)
        return self.head(hidden_states), hidden_states

    def head(self, x: mx.array) -> mx.array:
        """Compute logits `[B, T, V]` from the hidden states `[B, T, hidden]` after the final norm."""
        tied = self.config.tie_word_embeddings
        logits = self.model.embed_tokens.as_linear(x) if tied else self.lm_head(x)
        return soft_capped(logits, self.final_logit_softcap)

    @property
    def head_weight(self) -> mx.array:
        """The output matrix `[V, hidden]`, which is the embedding if they are tied. Before quantization only."""
        return (self.model.embed_tokens if self.config.tie_word_embeddings else self.lm_head).weight

    @property
    def head_bias(self) -> mx.array | None:
        """The bias of the output matrix, `[V]`; None if there is none."""
        return self.lm_head.bias if self.config.head_bias else None

    def cross_entropy(
        self, hidden: mx.array, targets: mx.array, weights: mx.array | None = None, **options: Any
    ) -> mx.array:
        """Compute the cross-entropy of the head's logits, see `linear_cross_entropy`. Before quantization only.

        Args:
            hidden: Hidden states `[..., hidden]`.
            targets: int `[...]`.
            weights: float32 `[...]`.
            options: `training` or `reduction`.
        """
        return linear_cross_entropy(
            hidden.reshape(-1, hidden.shape[-1]), self.head_weight, targets.flatten(),
            None if weights is None else weights.flatten(),
            bias=self.head_bias, softcap=self.final_logit_softcap, **options,
        )  # fmt: skip

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

    def init_weights(self, seed: int, parametrization: str = "standard") -> None:
        """Initialize the weights from `seed`.

        Normal with standard deviation 0.5 / sqrt(hidden), which is GPT-2's 0.02 at a hidden size of 768 and larger in
        smaller models. The projections into the residual are divided by sqrt(2·layers), so that its variance doesn't
        grow with depth (Radford et al. 2019, section 2.3). With `parametrization` "mup", times `mup_factors`.
        """
        keys = iter(mx.random.split(mx.random.key(seed), len(tree_flatten(self.parameters()))))
        deviation = 0.5 / math.sqrt(self.config.hidden_size)
        output_deviation = deviation / math.sqrt(2 * self.config.num_hidden_layers)
        weights = []
        for name, weight in tree_flatten(self.parameters()):
            key = next(keys)
            if name.endswith(".A_log"):  # as in Qwen3-Next, whose heads can keep more, and in Mamba 2
                value = mx.log(mx.random.uniform(0.01 if "linear_attn" in name else 1, 16, weight.shape, key=key))
            elif name.endswith("mamba.dt_bias"):  # the inverse softplus of steps between 0.001 and 0.1
                steps = mx.exp(mx.random.uniform(math.log(0.001), math.log(0.1), weight.shape, key=key))
                value = steps + mx.log(-mx.expm1(-steps))
            elif name.endswith((".dt_bias", "linear_attn.norm.weight", "mamba.norm.weight", "mamba.D")):
                value = mx.ones_like(weight)
            elif weight.ndim == 1 or name.endswith(".bias"):
                from_zero = name.endswith(("bias", "sinks")) or self.config.norm_unit_offset
                value = mx.zeros_like(weight) if from_zero else mx.ones_like(weight)
            elif weight.ndim == 2 and name.endswith((".conv.weight", ".conv1d.weight")):
                bound = weight.shape[1] ** -0.5  # PyTorch's for a convolution of this many taps
                value = mx.random.uniform(-bound, bound, weight.shape, key=key)
            else:
                outputs = ("o_proj.weight", "out_proj.weight", "down_proj.weight")
                scale = output_deviation if name.endswith(outputs) else deviation
                value = mx.random.normal(weight.shape, scale=scale, key=key)
            if parametrization == "mup" and not name.endswith((".bias", ".sinks")):
                offset = 1 if self.config.norm_unit_offset and weight.ndim == 1 else 0
                value = mup_factors(self.config, name, weight.ndim)[0] * (value + offset) - offset
            weights.append((name, value))
        self.load_weights(weights)


def soft_capped(logits: mx.array, softcap: float | None) -> mx.array:
    """Return logits between -softcap and softcap, as in Gemma 2: softcap · tanh(logits / softcap); None is no cap."""
    return logits if softcap is None else softcap * mx.tanh(logits / softcap)
