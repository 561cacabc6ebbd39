"""Keys or values of a cache in few bits: what `attention` takes in place of an array."""

from __future__ import annotations

from typing import NamedTuple

from mlxlm._mlx import mx


class Quantized(NamedTuple):
    """What `mx.quantize(x, group_size=group_size, bits=bits)` gives of x `[B, H_kv, S, D]`."""

    packed: mx.array  # uint32 [B, H_kv, S, D · bits / 32]
    scales: mx.array  # [B, H_kv, S, D / group_size], of the dtype that x had
    biases: mx.array  # the same
    bits: int
    group_size: int

    @classmethod
    def of(cls, x: mx.array, bits: int, group_size: int) -> Quantized:
        return cls(*mx.quantize(x, group_size=group_size, bits=bits), bits, group_size)

    @property
    def arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        return self[:3]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the values that it stands for."""
        return (*self.scales.shape[:-1], self.scales.shape[-1] * self.group_size)

    @property
    def dtype(self) -> mx.Dtype:
        return self.scales.dtype

    def dequantized(self) -> mx.array:
        return mx.dequantize(*self.arrays, group_size=self.group_size, bits=self.bits)

    def since(self, first: int) -> Quantized:
        """Without the positions before `first`."""
        return Quantized(*(x[:, :, first:] for x in self.arrays), self.bits, self.group_size)
