"""Quantized keys or values, which `attention` accepts instead of an array."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from mlxlm.backend.mlx import ON_CPU, mx


class QuantizedKV(NamedTuple):
    """The result of `mx.quantize(x, group_size=group_size, bits=bits)` for x `[B, H_kv, S, D]`.

    Args:
        packed: uint32 `[B, H_kv, S, D · bits / 32]`.
        scales: `[B, H_kv, S, D / group_size]` in the dtype of x.
        biases: As the scales.
        bits: Bits per value.
        group_size: Values that share a scale.
    """

    packed: mx.array
    scales: mx.array
    biases: mx.array
    bits: int
    group_size: int

    @classmethod
    def of(cls, x: mx.array, bits: int, group_size: int) -> QuantizedKV:
        """Quantize x `[B, H_kv, S, D]`."""
        packed, scales, biases = mx.quantize(x, group_size=group_size, bits=bits)
        return cls(packed, scales, biases, bits, group_size)

    @property
    def arrays(self) -> tuple[mx.array, mx.array, mx.array]:
        """The packed values, scales and biases."""
        return self[:3]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantized values: `[B, H_kv, S, D]`."""
        return (*self.scales.shape[:-1], self.scales.shape[-1] * self.group_size)

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of the dequantized values."""
        return self.scales.dtype

    def dequantized(self) -> mx.array:
        """Return the values, bit-identical to those of `mx.dequantize`.

        On MLX's CPU backend, `mx.dequantize` takes 1.1 ns per value at 8 bits and 1.5 at 4. Unpacking to bytes and
        converting those, which the compiler vectorises, takes 0.3 and 0.7.
        """
        if not ON_CPU or self.dtype != mx.float32 or self.bits not in (8, 4):
            return mx.dequantize(*self.arrays, group_size=self.group_size, bits=self.bits)
        packed = self.packed if self.bits == 8 else _unpack_4bit(self.packed.view(mx.uint16))
        codes = mx.unflatten(packed.view(mx.uint8).astype(mx.float32), -1, (-1, self.group_size))
        return (codes * self.scales[..., None] + self.biases[..., None]).flatten(-2)


def quantization(keys: mx.array | QuantizedKV, values: mx.array | QuantizedKV) -> dict[str, int]:
    """Group size, and bits of keys and of values (0: not quantized); {} if neither is quantized."""
    sides = keys, values
    group_size = next((x.group_size for x in sides if isinstance(x, QuantizedKV)), None)
    if group_size is None:
        return {}
    key_bits, value_bits = (x.bits if isinstance(x, QuantizedKV) else 0 for x in sides)
    return {"group_size": group_size, "key_bits": key_bits, "value_bits": value_bits}


@partial(mx.compile, shapeless=True)
def _unpack_4bit(packed: mx.array) -> mx.array:
    """Unpack the four 4-bit codes of each uint16 to the bytes of a uint32."""
    x = packed.astype(mx.uint32)
    x = (x | (x << 8)) & 0x00FF00FF
    return (x | (x << 4)) & 0x0F0F0F0F
