"""RMSNorm and LayerNorm."""

from __future__ import annotations

from collections.abc import Sequence

from mlxlm.backend.mlx import mx, nn
from mlxlm.backend.process_group import ProcessGroup
from mlxlm.config import ModelConfig
from mlxlm.config.components import NORMS
from mlxlm.kernels import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """RMSNorm (Zhang & Sennrich 2019) over the last axis. With `unit_offset`, the scale is weight + 1 (Gemma)."""

    def __init__(self, size: int, eps: float, unit_offset: bool = False):
        super().__init__()
        self.weight = mx.zeros((size,)) if unit_offset else mx.ones((size,))
        self.eps, self.unit_offset = float(eps), unit_offset

    @property
    def scale(self) -> mx.array:
        """The scale of the normalized values, `[size]`."""
        return self.weight + 1 if self.unit_offset else self.weight

    def __call__(self, x: mx.array) -> mx.array:
        """Normalize `x` over its last axis."""
        return rms_norm(x, self.scale, self.eps)

    def add_norm(self, hidden_states: mx.array, residual: mx.array) -> tuple[mx.array, mx.array]:
        """Return the sum of the arguments and its norm, in one pass over memory."""
        return add_rms_norm(hidden_states, residual, self.scale, self.eps)


def split_rms_norm(parts: Sequence[mx.array], eps: float, process_group: ProcessGroup) -> list[mx.array]:
    """Normalize vectors over their last axis, float32, of which each process has an equally long part."""
    squares = [mx.square(x.astype(mx.float32)).mean(axis=-1, keepdims=True) for x in parts]
    means = process_group.all_sum(mx.concatenate(squares, axis=-1)) / process_group.size
    factors = mx.split(mx.rsqrt(means + eps), len(parts), axis=-1)
    return [x * factor for x, factor in zip(parts, factors, strict=True)]


class LayerNorm(nn.Module):
    """LayerNorm (Ba et al. 2016) over the last axis, with `vectors` of weight and bias."""

    def __init__(self, size: int, eps: float, vectors: int = 2):
        super().__init__()
        if vectors > 0:
            self.weight = mx.ones((size,))
        if vectors > 1:
            self.bias = mx.zeros((size,))
        self.eps = float(eps)

    def __call__(self, x: mx.array) -> mx.array:
        """Normalize `x` over its last axis."""
        return mx.fast.layer_norm(x, self.get("weight"), self.get("bias"), self.eps)

    def add_norm(self, hidden_states: mx.array, residual: mx.array) -> tuple[mx.array, mx.array]:
        """Return the sum of the arguments and its norm."""
        residual = residual + hidden_states
        return residual, self(residual)


class LayerNormPerHead(nn.Module):
    """LayerNorm of each head, with weights of its own and no bias."""

    def __init__(self, heads: int, size: int, eps: float):
        super().__init__()
        self.weight = mx.ones((heads * size,))
        self.eps = float(eps)

    def __call__(self, x: mx.array) -> mx.array:
        """Normalize `x` `[B, H, T, D]` over its last axis."""
        return mx.fast.layer_norm(x, None, None, self.eps) * self.weight.reshape(x.shape[1], 1, -1)


Norm = RMSNorm | LayerNorm


def make_norm(config: ModelConfig, size: int | None = None) -> Norm:
    """Make a norm of `size` values, by default the hidden size."""
    size = size or config.hidden_size
    if config.norm != "rms":
        return LayerNorm(size, config.rms_norm_eps, NORMS[config.norm].vectors)
    return RMSNorm(size, config.rms_norm_eps, config.norm_unit_offset)


def make_qk_norm(config: ModelConfig, heads: int, size: int) -> nn.Module:
    """Make the norm of the queries or keys of `heads` heads of `size` dimensions, which has weights."""
    eps, kind = config.rms_norm_eps, config.qk_norm
    if kind == "layer":
        return LayerNorm(size, eps)
    if kind == "layer_per_head":
        return LayerNormPerHead(heads, size, eps)
    return RMSNorm(heads * size if kind == "projection" else size, eps, config.norm_unit_offset)


def add_norm(norm: Norm | None, residual: mx.array, hidden_states: mx.array | None) -> tuple[mx.array, mx.array]:
    """Do the deferred residual addition and normalize the sum.

    Args:
        norm: The norm before the next sublayer, or None.
        residual: `[B, T, hidden]`.
        hidden_states: The sublayer's output to add, or None before the first layer.

    Returns:
        The new residual, and the input of the next sublayer: its norm, or itself without one.
    """
    if norm is None:
        residual = residual if hidden_states is None else residual + hidden_states
        return residual, residual
    return (residual, norm(residual)) if hidden_states is None else norm.add_norm(hidden_states, residual)
