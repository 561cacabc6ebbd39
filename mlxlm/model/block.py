"""A decoder layer: a mixer of tokens and a feed-forward (MLP) with their norms and residual connections.

With gradient checkpointing, the gradient recomputes the activations of a layer instead of keeping them (Chen et al.
2016, "Training Deep Nets with Sublinear Memory Cost"), with the same dropout masks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mlxlm.backend.mlx import mx, nn, tree_flatten, tree_unflatten
from mlxlm.backend.process_group import ProcessGroup
from mlxlm.config import ModelConfig
from mlxlm.kernels import with_fused_gradients
from mlxlm.model.attention import Attention, KeysAndValues
from mlxlm.model.experts import MixtureOfExperts
from mlxlm.model.feed_forward import FeedForward, gated_activation
from mlxlm.model.gated_delta import GatedDeltaNet
from mlxlm.model.latent_attention import LatentAttention
from mlxlm.model.linear import Linear
from mlxlm.model.mamba2 import Mamba2
from mlxlm.model.norms import add_norm, make_norm
from mlxlm.model.short_conv import ShortConv


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
        self.multiplier = float(config.residual_multiplier)
        for name in self.norms.names(config.has_mlp(layer)):
            setattr(self, name, make_norm(config))
        self.mixer_name, mixer = MIXERS[config.mixer(layer)]
        self[self.mixer_name] = mixer(config, layer)
        self.mlp: Any = MLPS[config.mlp(layer)](config, layer) if config.has_mlp(layer) else None
        if config.enable_moe_block:
            self.experts = MixtureOfExperts(config)
            for name in _EXPERT_NORMS:
                setattr(self, name, make_norm(config))
        if config.hidden_size_per_layer_input is not None:
            self.activation = gated_activation(config.hidden_act)
            self.per_layer_input_gate = Linear(config.hidden_size, config.hidden_size_per_layer_input, bias=False)
            self.per_layer_projection = Linear(config.hidden_size_per_layer_input, config.hidden_size, bias=False)
            self.post_per_layer_input_norm = make_norm(config)
        if config.layer_scalar:
            self.layer_scalar = mx.ones(1)
        self.dropout = Dropout(dropout)
        self.process_group: ProcessGroup | None = None  # see `Decoder.split`

    @property
    def mixer(self) -> nn.Module:
        """The sublayer that mixes tokens."""
        return self[self.mixer_name]

    def fuse(self) -> None:
        """Fuse the projections of the same input, for decoding steps."""
        self.mixer.fuse()
        if self.mlp is not None:
            self.mlp.fuse()

    def unfuse(self) -> None:
        """Forget the fused projections, so that memory doesn't hold them and new weights."""
        self.mixer.unfuse()
        if self.mlp is not None:
            self.mlp.unfuse()

    def __call__(
        self,
        residual: mx.array,
        hidden_states: mx.array | None,
        cache: Any = None,
        segment_ids: mx.array | None = None,
        per_layer_input: mx.array | None = None,
    ) -> tuple[mx.array, mx.array | None]:
        """Apply the layer.

        Args:
            residual: `[B, T, hidden]`, or `[B, hidden]` in a decoding step (`Decoder.decode`).
            hidden_states: Output of the layer before, not yet added to `residual`. None for the first layer, and with
                post-norm.
            cache: The layer's cache, see `layer_caches`.
            segment_ids: See `Attention`.
            per_layer_input: The layer's entry of `Backbone.per_layer_inputs`.

        Returns:
            The residual, and this layer's output, which is yet to be added. None if it was, as with post-norm.
        """
        residual, hidden_states = self._apply_sublayers(residual, hidden_states, cache, segment_ids)
        if per_layer_input is not None:
            residual, x = add_norm(None, residual, hidden_states)
            activation = with_fused_gradients(self.activation) if self.training else self.activation
            x = self.per_layer_projection(activation(self.per_layer_input_gate(x), per_layer_input))
            hidden_states = self.dropout(self.post_per_layer_input_norm(x))
        if "layer_scalar" in self or self.norms.after_addition:  # where the next layer expects a sum
            residual, hidden_states = add_norm(None, residual, hidden_states)[0], None
        return residual * self.layer_scalar if "layer_scalar" in self else residual, hidden_states

    def _apply_sublayers(
        self, residual: mx.array, hidden_states: mx.array | None, cache: Any, segment_ids: mx.array | None
    ) -> tuple[mx.array, mx.array | None]:
        norms = self.norms
        if norms.after_addition:  # Vaswani et al. 2017, section 3.1
            hidden_states = self._output(self._sum(self.mixer(residual, cache, segment_ids)))
            residual = add_norm(self[norms.attention_output], residual, hidden_states)[1]
            if self.mlp is None:
                return residual, None
            return add_norm(self[norms.mlp_output], residual, self._mlp_output(residual, residual))[1], None
        residual, x = add_norm(self.get(norms.attention_input), residual, hidden_states)
        hidden_states = self._output(self._sum(self.mixer(x, cache, segment_ids)), norms.attention_output)
        if self.mlp is None:
            return residual, hidden_states
        if self.parallel:
            x = x if norms.mlp_input is None else self[norms.mlp_input](residual)
            return residual, hidden_states + self._mlp_output(x, residual, norms.mlp_output)
        residual, x = add_norm(self.get(norms.mlp_input), residual, hidden_states)
        return residual, self._mlp_output(x, residual, norms.mlp_output)

    def _mlp_output(self, x: mx.array, residual: mx.array, norm: str | None = None) -> mx.array:
        """The output of the feed-forward, which reads `x`, and of experts beside it, which read the residual."""
        if "experts" not in self:
            return self._output(self._sum(self.mlp(x)), norm)
        experts_norm, *output_norms = (self[name] for name in _EXPERT_NORMS)
        parts = [self.mlp(x), self.experts(experts_norm(residual), residual)]
        if self.process_group is not None:
            parts = [*self._sum(mx.stack(parts))]
        mlp, experts = (own(part) for own, part in zip(output_norms, parts, strict=True))
        return self._output(mlp + experts, norm)

    def _sum(self, hidden_states: mx.array) -> mx.array:
        """Add up the parts of a sublayer's output that the processes have."""
        return hidden_states if self.process_group is None else self.process_group.all_sum(hidden_states)

    def _output(self, hidden_states: mx.array, norm: str | None = None) -> mx.array:
        """Apply the norm of a sublayer's output, if there is one, the residual multiplier and dropout."""
        hidden_states = hidden_states if norm is None else self[norm](hidden_states)
        return self.dropout(hidden_states if self.multiplier == 1 else hidden_states * self.multiplier)


def layer_caches(kv_layers: Sequence[int], cache: Sequence[Any] | None = None) -> list[Any]:
    """The cache of each layer: its own, or that of the layer whose keys and values it reads.

    Args:
        kv_layers: See `ModelConfig.kv_layers`.
        cache: The caches of the layers that have one of their own. None or empty without caches.

    Returns:
        Caches for one forward pass. Without caches, a `KeysAndValues` where layers share it, and None elsewhere.
    """
    if cache:
        return [cache[layer] for layer in kv_layers]
    shared = {layer: KeysAndValues() for index, layer in enumerate(kv_layers) if layer != index}
    return [shared.get(layer) for layer in kv_layers]


def checkpointed_layer(
    layer: Block,
    residual: mx.array,
    hidden_states: mx.array | None,
    cache: KeysAndValues | None,
    segment_ids: mx.array | None,
    per_layer_input: mx.array | None,
) -> tuple[mx.array, mx.array | None]:
    """Apply a layer, keeping only its inputs and outputs for the gradient.

    Unlike with `mx.checkpoint`, both passes draw the same dropout masks, and the second pass waits until the gradient
    reaches the layer, so that the activations of one layer exist at a time.
    """
    key = mx.random.randint(0, 1 << 31, (2,), dtype=mx.uint32) if layer.dropout.active else None
    names, weights = zip(*tree_flatten(layer.trainable_parameters()), strict=True)
    writes = cache is not None and not layer.mixer.shares_kv
    keys, values = (None, None) if cache is None or writes else cache.fetch()
    inputs = (residual, hidden_states, per_layer_input, keys, values, segment_ids, key)
    count = len(names) + sum(x is not None for x in inputs[:5])  # arrays with a gradient

    def forward(*arrays: mx.array) -> tuple[mx.array, ...]:
        rest = iter(arrays[len(names) :])
        own = [None if x is None else next(rest) for x in inputs]
        own_residual, own_hidden_states, own_input, *own_kv, ids, own_key = own
        own_cache = KeysAndValues(*own_kv)
        before = layer.trainable_parameters()
        layer.update(tree_unflatten(list(zip(names, arrays, strict=False))))
        layer.dropout.set_key(own_key)
        out = layer(own_residual, own_hidden_states, own_cache if cache else None, ids, own_input)
        layer.dropout.set_key(None)
        layer.update(before)
        return tuple(x for x in (*out, *(own_cache.fetch() if writes else ())) if x is not None)

    run = mx.custom_function(forward)

    @run.vjp
    def run_vjp(primals: list[mx.array], cotangents: list[mx.array], _outputs: list[mx.array]) -> tuple[mx.array, ...]:
        primals = mx.depends(list(primals), list(cotangents))
        others = primals[count:]
        _, gradients = mx.vjp(lambda *xs: forward(*xs, *others), primals[:count], list(cotangents))
        # Free what the weights' gradients need before the layer below starts.
        below = mx.depends(gradients[len(names) :], gradients[: len(names)])
        return (*gradients[: len(names)], *below, *(mx.zeros_like(x) for x in others))

    out = run(*weights, *(x for x in inputs if x is not None))
    if cache and writes:
        *out, keys, values = out
        cache.update_and_fetch(keys, values)
    return (out[0], out[1]) if len(out) == 2 else (out[0], None)


# By the names of `mlxlm.config.sublayers`: the module in the layer and its class, and the class of the feed-forward,
# which a layer may not have.
MIXERS = {
    "attention": ("self_attn", Attention),
    "latent_attention": ("self_attn", LatentAttention),
    "short_conv": ("conv", ShortConv),
    "gated_delta": ("linear_attn", GatedDeltaNet),
    "mamba2": ("mamba", Mamba2),
}
MLPS: dict[str, Callable[[ModelConfig, int], nn.Module]] = {
    "mlp": lambda config, layer: FeedForward(config, config.mlp_width(layer)),
    "experts": lambda config, layer: MixtureOfExperts(config),
}
# Of experts beside a feed-forward: of the experts' input, of the feed-forward's output, and of the experts' output.
_EXPERT_NORMS = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
