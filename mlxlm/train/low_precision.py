"""Optimizer state and weights in fewer bits: stochastic rounding to bfloat16, and block-wise quantization to int8."""

from __future__ import annotations

from typing import Any

from mlxlm.backend.mlx import mx, optim
from mlxlm.config.optimizers import MIN_ROW

_SCALE = "_scale"  # ends the names of the scales of int8 values
_LEVELS = 127


class LowPrecision(optim.Optimizer):
    """Mixin for an optimizer: computes updates in float32, and stores weights and averages in fewer bits.

    bfloat16 weights and averages are rounded stochastically: a change is often smaller than half of a bfloat16's last
    bit, and would be lost. int8 averages are quantized block-wise (Dettmers et al. 2022, "8-bit Optimizers via
    Block-wise Quantization"); a block is a row of a matrix. Vectors, short rows, and sums over rows or columns stay
    float32.

    Attributes:
        state_dtype: "float32", "bfloat16" or "int8", of averages as large as a matrix.
        squares: Names of averages of squares.
        key: For stochastic rounding, a uint32 scalar. Set it before each update.
    """

    state_dtype = "float32"
    squares: tuple[str, ...] = ()
    key: mx.array | None = None

    def init_single(self, parameter: mx.array, state: dict[str, Any]) -> None:
        """Fill the `state` of a parameter with zeros."""
        super().init_single(mx.zeros(parameter.shape), state)
        state.update({name: mx.zeros(x.shape, x.dtype) for name, x in self._stored(state, parameter.shape).items()})

    def apply_single(self, gradient: mx.array, parameter: mx.array, state: dict[str, Any]) -> mx.array:
        """Return the updated `parameter`, in its dtype, and update its `state`."""
        values = {name: self._float32(name, state) for name in state if not name.endswith(_SCALE)}
        updated = super().apply_single(gradient.astype(mx.float32), parameter.astype(mx.float32), values)
        state.update(self._stored(values, parameter.shape))
        if parameter.dtype == mx.bfloat16:
            updated = stochastic_round(updated, self.key)
        return separate_kernels([updated], gradient)[0]

    def _stored(self, values: dict[str, mx.array], shape: tuple[int, ...]) -> dict[str, mx.array]:
        """Return averages as they are stored."""
        stored = dict(values)
        for name, average in values.items():
            if self.state_dtype == "float32" or average.shape != shape or len(shape) < 2 or shape[-1] < MIN_ROW:
                continue
            if self.state_dtype == "bfloat16":
                stored[name] = stochastic_round(average, self.key)
            else:
                stored[name], stored[name + _SCALE] = quantize(average, self.key, name in self.squares)
        return stored

    def _float32(self, name: str, state: dict[str, mx.array]) -> mx.array:
        """Return an average of a `state`."""
        if (scale := state.get(name + _SCALE)) is None:
            return state[name].astype(mx.float32)
        return dequantize(state[name], scale, name in self.squares)


def separate_kernels(arrays: list[mx.array], dependency: mx.array) -> list[mx.array]:
    """Return `arrays`, which `mx.compile` then doesn't fuse with what uses them.

    A fused kernel with several results doesn't reuse the memory of its arguments for them, as one with a single result
    does: AdamW's update as one kernel took 28 bytes per parameter instead of 16, and a third more time on a CPU.
    """
    return mx.depends(arrays, [dependency])


def stochastic_round(x: mx.array, key: mx.array | None) -> mx.array:
    """Round float32 to one of the two nearest bfloat16, so that the expected value over all keys is `x`.

    Args:
        x: Float32 of any shape.
        key: A uint32 scalar; None: round to the nearest.
    """
    if key is None:
        return x.astype(mx.bfloat16)
    bits = x.view(mx.uint32)
    rounded = (bits + (_hash(bits, key) >> 16)) >> 16
    return rounded.astype(mx.uint16).view(mx.bfloat16)


def quantize(x: mx.array, key: mx.array | None, squares: bool = False) -> tuple[mx.array, mx.array]:
    """Quantize float32 `[..., N]` to int8 codes `[..., N]` and float32 scales `[..., 1]`, with stochastic rounding.

    A value is divided by the largest magnitude of its row. 127 times the square root is the code, with the sign. So the
    smallest values are 16,000 times smaller than the largest, which an optimizer needs more than exact large ones.
    Dettmers et al. use a table for the same purpose; a root is computed faster than a value is looked up.

    Args:
        x: Finite values.
        key: See `stochastic_round`.
        squares: Quantize the square roots of `x`, which are what AdamW divides by.
    """
    scale = mx.maximum(mx.maximum(x.max(-1, keepdims=True), -x.min(-1, keepdims=True)), 1e-30)
    root = mx.sqrt(mx.abs(x) / scale)
    root = mx.sqrt(root) if squares else mx.sign(x) * root
    dither = 0.5 if key is None else (_hash(x.view(mx.uint32), key) >> 8).astype(mx.float32) * 2**-24
    return mx.floor(_LEVELS * root + dither).astype(mx.int8), scale


def dequantize(codes: mx.array, scale: mx.array, squares: bool = False) -> mx.array:
    """Return the float32 values of `quantize`."""
    root = codes.astype(mx.float32) * (1 / _LEVELS)
    return root.square().square() * scale if squares else root * mx.abs(root) * scale


def _hash(bits: mx.array, key: mx.array) -> mx.array:
    """Return uint32 `bits` as other ones, whose upper 24 are uniform over all keys.

    It takes a tenth of the time of MLX's random numbers on a CPU, and no memory.
    """
    bits = (bits ^ key) * 0x85EBCA6B  # constants of MurmurHash3
    return (bits ^ (bits >> 15)) * 0xC2B2AE35
