"""The feed-forward (MLP) of a layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from mlxlm.backend.mlx import mx, nn
from mlxlm.config import ModelConfig
from mlxlm.kernels import clamped_swiglu, gelu, gelu_tanh, swiglu, with_fused_gradients
from mlxlm.model.linear import FusedProjections, Linear

ACTIVATIONS = {
    "silu": nn.silu,
    "gelu": gelu,
    "gelu_new": gelu_tanh,  # GPT-2's name
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": nn.relu,
    "relu2": nn.relu2,
    "sigmoid": mx.sigmoid,
}


def make_activation(config: ModelConfig) -> Callable[..., mx.array]:
    """The activation: a function of up, or with a gate a function of gate and up, act(gate) · up."""
    if config.swiglu_limit is not None:
        return clamped_swiglu(config.swiglu_alpha, config.swiglu_limit)
    return gated_activation(config.hidden_act) if config.mlp_gated else ACTIVATIONS[config.hidden_act]


@cache
def gated_activation(name: str) -> Callable[..., mx.array]:
    """The function of gate and up, act(gate) · up."""
    activation = ACTIVATIONS[name]
    return swiglu if activation is nn.silu else lambda gate, up: activation(gate) * up


class FeedForward(FusedProjections):
    """Feed-forward: down(act(gate(x)) · up(x)), or down(act(up(x))) without a gate."""

    def __init__(self, config: ModelConfig, intermediate_size: int):
        super().__init__()
        h, inner, bias = config.hidden_size, intermediate_size, config.mlp_bias
        self.gated, self.activation = config.mlp_gated, make_activation(config)
        if self.gated:
            self.gate_proj = Linear(h, inner, bias=bias)
        self.up_proj = Linear(h, inner, bias=bias)
        self.down_proj = Linear(inner, h, bias=bias)

    def _projections(self) -> dict[str, list[nn.Module]]:
        return {"inputs": [self.gate_proj, self.up_proj] if self.gated else [self.up_proj], "down": [self.down_proj]}

    def decode(self, x: mx.array) -> mx.array:
        """Apply the feed-forward to one position per row, `[B, hidden]`, after `fuse`."""
        rows, x = x.shape[0], self._fused.inputs(x)
        if not self.gated:
            return self._fused.down(self.activation(x))
        # Halves of one row would hand the stride of the whole row on, and MLX's product would copy its input first.
        halves = x.reshape(rows, 2, -1)
        return self._fused.down(self.activation(halves[:, :1], halves[:, 1:]).reshape(rows, -1))

    def __call__(self, x: mx.array) -> mx.array:
        """Apply the feed-forward to `x` `[B, T, hidden]`."""
        if x.ndim == 2:
            return self.decode(x)
        inputs = [self.gate_proj(x), self.up_proj(x)] if self.gated else [self.up_proj(x)]
        activation = with_fused_gradients(self.activation) if self.training else self.activation
        return self.down_proj(activation(*inputs))
