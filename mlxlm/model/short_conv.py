"""Gated short convolutions, which mix a few neighboring tokens (LFM2: Liquid AI 2025)."""

from __future__ import annotations

from functools import partial
from typing import Any

from mlxlm.backend.mlx import mx, nn
from mlxlm.config import ModelConfig
from mlxlm.model.linear import FusedProjections, Linear


class CausalConv1d(nn.Module):
    """A causal convolution of each channel by itself over the tokens of a text.

    Its cache are the last inputs: one array `[B, channels]` for each tap but the last, the earliest first.

    Args:
        channels: Number of channels.
        taps: Inputs of an output: the position's own and those before it.
        bias: Whether a bias is added.
    """

    def __init__(self, channels: int, taps: int, bias: bool = False):
        super().__init__()
        self.weight = mx.zeros((channels, taps))
        if bias:
            self.bias = mx.zeros((channels,))

    @property
    def history(self) -> int:
        """Number of earlier inputs of an output."""
        return self.weight.shape[1] - 1

    @property
    def state_shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the arrays in its cache, for one row."""
        return [(self.weight.shape[0],)] * self.history

    def __call__(self, x: mx.array, cache: Any = None, segment_ids: mx.array | None = None) -> mx.array:
        """Convolve.

        Args:
            x: `[B, T, channels]`, or `[B, channels]` in a decoding step, with a cache.
            cache: The layer's cache; its first arrays are read and replaced. Except in a decoding step, this begins
                its update; padding is read as zeros, and its outputs are zeros.
            segment_ids: int `[B, T]`, the document of each position in packed rows, which see only their own document.

        Returns:
            The same shape as `x`.
        """
        n, visible = self.history, None
        if cache is not None and x.ndim == 3 and (visible := cache.begin_update(*x.shape[:2])) is not None:
            x = mx.where(visible[..., None], x, 0)
        earlier = [None if cache is None else cache[i] for i in range(n)]
        if x.ndim == 2:
            inputs = [*earlier, x]
            last = inputs[1:]
        else:
            B, T, channels = x.shape
            zeros = mx.zeros((B, channels), x.dtype)
            padded = (
                mx.concatenate([mx.stack([zeros if e is None else e for e in earlier], axis=1), x], axis=1) if n else x
            )
            inputs = [padded[:, i : i + T] for i in range(n + 1)]
            if segment_ids is not None:
                ids = mx.pad(segment_ids, [(0, 0), (n, 0)], constant_values=-1)
                inputs = [mx.where((ids[:, i : i + T] == segment_ids)[..., None], y, 0) for i, y in enumerate(inputs)]
            last = [padded[:, T + i] for i in range(n)]
        for i in range(n if cache is not None else 0):
            cache[i] = last[i]
            if x.ndim == 3:
                cache.set_after(i, lambda count, i=i: padded[:, count + i])
        out = _weighted_sum(inputs, [self.weight[:, i] for i in range(n + 1)])
        if "bias" not in self:
            return out
        out = out + self.bias
        return out if visible is None else mx.where(visible[..., None], out, 0)


@partial(mx.compile, shapeless=True)
def _weighted_sum(inputs: list[mx.array], weights: list[mx.array]) -> mx.array:
    out = inputs[0] * weights[0]
    for x, weight in zip(inputs[1:], weights[1:], strict=True):
        out = out + x * weight
    return out


class ShortConv(FusedProjections):
    """A gated short convolution: C · conv(B · x), where B, C and x are projections of the input.

    Args:
        config: The model's configuration.
        layer: Index of the layer.

    Attributes:
        state_shapes: Of the arrays in its cache, for one row.
    """

    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        hidden, channels, bias = config.hidden_size, config.conv_dim or config.hidden_size, config.conv_bias
        self.in_proj = Linear(hidden, 3 * channels, bias=bias)
        self.conv = CausalConv1d(channels, config.conv_L_cache, bias)
        self.state_shapes = self.conv.state_shapes
        self.out_proj = Linear(channels, hidden, bias=bias)

    def __call__(self, x: mx.array, cache: Any = None, segment_ids: mx.array | None = None) -> mx.array:
        """Apply the convolution.

        Args:
            x: `[B, T, hidden]`, or `[B, hidden]` in a decoding step, after `fuse`.
            cache: The layer's `RecurrentCache`.
            segment_ids: See `CausalConv1d`. Not with a cache.

        Returns:
            The same shape as `x`.
        """
        if x.ndim == 2:
            before, after, values = mx.split(self._fused.inputs(x), 3, axis=-1)
            return self._fused.output(after * self.conv(before * values, cache))
        before, after, values = mx.split(self.in_proj(x), 3, axis=-1)
        return self.out_proj(after * self.conv(before * values, cache, segment_ids))
