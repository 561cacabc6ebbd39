"""The feed-forward sublayer (MLP), gated or plain, and its activations."""

from __future__ import annotations

from mlxlm.backend.mlx import mx, nn
from mlxlm.config import ModelConfig
from mlxlm.kernels import gelu, gelu_tanh, swiglu
from mlxlm.model.linear import Linear

ACTIVATIONS = {
    "silu": nn.silu,
    "gelu": gelu,
    "gelu_new": gelu_tanh,  # GPT-2's name
    "gelu_pytorch_tanh": gelu_tanh,
    "relu": nn.relu,
    "sigmoid": mx.sigmoid,
}


class FeedForward(nn.Module):
    """Feed-forward: down(act(gate(x)) · up(x)), or down(act(up(x))) without a gate."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        h, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gated, self.is_swiglu = config.mlp_gated, config.mlp_gated and config.hidden_act == "silu"
        self.activation = ACTIVATIONS[config.hidden_act]
        if self.gated:
            self.gate_proj = Linear(h, inner, bias=bias)
        self.up_proj = Linear(h, inner, bias=bias)
        self.down_proj = Linear(inner, h, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        """Apply the feed-forward to `x` `[B, T, hidden]`."""
        if self.is_swiglu:
            return self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        if self.gated:
            return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(self.activation(self.up_proj(x)))
