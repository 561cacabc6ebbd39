"""Buffers of a cache: the keys or the values of all rows, plain or quantized."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlxlm.backend.mlx import ON_CPU, mx
from mlxlm.kernels import QuantizedKV
from mlxlm.kernels.dispatch import DTYPE_NAMES
from mlxlm.utils.errors import GenerationError

GROUP_SIZES = (64, 32)  # in order of preference


def group_size(*dims: int) -> int:
    """Choose the quantization group size: 64, or 32 if 64 doesn't divide all head dims.

    Raises:
        GenerationError: Neither divides all of `dims`.
    """
    for size in GROUP_SIZES:
        if all(dim % size == 0 for dim in dims):
            return size
    head_dims = " and ".join(str(dim) for dim in sorted(set(dims)))
    raise GenerationError(
        f"a cache of head dim {head_dims} can't be quantized, it must be a multiple of 32",
        "no `key_bits`",
        is_operator_hint=True,
    )


class KVBuffer:
    """A buffer `[B, H, capacity, D]`, stored as one array or as the three arrays of `mx.quantize`.

    Args:
        arrays: The array, or the packed values, scales and biases; they share the first three axes.
        quantization: Bits (8 or 4) and group size, None if not quantized.
    """

    __slots__ = ("arrays", "quantization")

    def __init__(self, arrays: Sequence[mx.array], quantization: tuple[int, int] | None) -> None:
        self.arrays, self.quantization = list(arrays), quantization

    @classmethod
    def like(cls, x: mx.array, quantization: tuple[int, int] | None) -> KVBuffer:
        """Make an empty buffer for positions with the shape and dtype of x `[B, H, T, D]`."""
        empty = x[:, :, :0]
        if quantization is None:
            return cls([empty], None)
        bits, group = quantization
        packed = empty.astype(mx.uint32)[..., : x.shape[3] * bits // 32]
        scales = empty[..., : x.shape[3] // group]
        return cls([packed, scales, scales], quantization)

    @property
    def rows(self) -> int:
        """Batch size B."""
        return self.arrays[0].shape[0]

    @property
    def capacity(self) -> int:
        """Number of positions."""
        return self.arrays[0].shape[2]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dequantized values: `[B, H, capacity, D]`."""
        _, group = self.quantization or (None, 1)
        return (*self.arrays[0].shape[:3], self.arrays[-1].shape[3] * group)

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype of the values that are written, before quantization."""
        return self.arrays[-1].dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(x.nbytes for x in self.arrays)

    def quantize(self, x: mx.array) -> Sequence[mx.array]:
        """Encode x `[B, H, T, D]` in the form of the arrays."""
        return [x] if self.quantization is None else QuantizedKV.of(x, *self.quantization).arrays

    def write(self, first: int, end: int, x: mx.array) -> None:
        """Write x `[B, H, end - first, D]` to these positions, in place unless the arrays are shared."""
        if self.quantization is None:  # per layer and token: avoid lists
            self.arrays[0][..., first:end, :] = x
            return
        for array, part in zip(self.arrays, self.quantize(x), strict=True):
            array[..., first:end, :] = part

    def with_position(self, index: mx.array, x: mx.array) -> KVBuffer:
        """Return a buffer with x `[B, H, T, D]` from position `index` on, int32 `[1]`, for a compiled function."""
        pairs = zip(self.arrays, self.quantize(x), strict=True)
        return KVBuffer([_with_position(array, index, part) for array, part in pairs], self.quantization)

    def repeated(self, count: int) -> KVBuffer:
        """Return a buffer with the only row of this one `count` times, without a copy; for 1 this one."""
        return self if count == 1 else self.map_arrays(lambda x: mx.broadcast_to(x, (count, *x.shape[1:])))

    def write_to_row(self, row: int, first: int, parts: Sequence[mx.array]) -> None:
        """Write already encoded positions to one row, starting at position `first`."""
        for array, part in zip(self.arrays, parts, strict=True):
            array[row : row + 1, :, first : first + part.shape[2]] = part

    def read(self, first: int, end: int) -> mx.array | QuantizedKV:
        """Return positions `first` to `end`, quantized if the buffer is."""
        if self.quantization is None:
            return self.arrays[0][..., first:end, :]
        return QuantizedKV._make([*(x[..., first:end, :] for x in self.arrays), *self.quantization])

    def dequantized(self) -> mx.array:
        """Return all positions `[B, H, capacity, D]` in their original dtype."""
        values = self.read(0, self.capacity)
        return values.dequantized() if isinstance(values, QuantizedKV) else values

    def slice_row(self, row: int, first: int, end: int) -> KVBuffer:
        """Copy positions of one row to a new buffer."""
        return self.map_arrays(lambda x: mx.contiguous(x[row : row + 1, :, first:end]))

    def map_arrays(self, change: Callable[[mx.array], mx.array]) -> KVBuffer:
        """Return a new buffer with `change` applied to each array."""
        return KVBuffer([change(x) for x in self.arrays], self.quantization)

    def resize(self, first: int, end: int, capacity: int) -> KVBuffer:
        """Return a new buffer of `capacity` positions that begins with positions `first` to `end` of this one."""
        return self.map_arrays(lambda x: zero_pad(x[:, :, first:end], 0, capacity - (end - first)))

    @classmethod
    def of(cls, arrays: Sequence[mx.array], bits: int | None) -> KVBuffer:
        """Make a buffer from existing arrays.

        Raises:
            ValueError: The shapes or dtypes don't fit together.
        """
        valid = len({x.shape[:3] for x in arrays}) == 1 and all(x.ndim == 4 and x.shape[3] for x in arrays)
        valid = valid and all(x.dtype in DTYPE_NAMES for x in (arrays if bits is None else arrays[1:]))
        quantization = None
        if bits is not None and valid:
            packed, scales, biases = arrays
            group = packed.shape[3] * 32 // bits // scales.shape[3]
            widths = packed.shape[3] * 32, biases.shape[3]
            valid = packed.dtype == mx.uint32 and scales.dtype == biases.dtype
            valid = valid and group in GROUP_SIZES and widths == (scales.shape[3] * group * bits, scales.shape[3])
            quantization = bits, group
        if not valid:
            kind = "unquantized" if bits is None else f"{bits}-bit"
            raise ValueError(f"not {kind} keys or values: " + ", ".join(f"{x.shape} {x.dtype}" for x in arrays))
        return cls(arrays, quantization)

    @classmethod
    def join(cls, pieces: Sequence[KVBuffer], capacity: int) -> KVBuffer:
        """Concatenate the positions of several buffers, followed by zeros up to `capacity`."""
        missing = capacity - sum(piece.capacity for piece in pieces)
        arrays = []
        for parts in zip(*(piece.arrays for piece in pieces), strict=True):
            B, H, _, width = parts[0].shape
            arrays.append(mx.concatenate([*parts, mx.zeros((B, H, missing, width), parts[0].dtype)], axis=2))
        return cls(arrays, pieces[0].quantization)

    @classmethod
    def stack(cls, buffers: Sequence[KVBuffer]) -> KVBuffer:
        """Concatenate the rows of several buffers, aligned at the end (left-padded with zeros)."""
        longest = max(buffer.capacity for buffer in buffers)
        aligned = [buffer.map_arrays(lambda x: zero_pad(x, longest - x.shape[2], 0)).arrays for buffer in buffers]
        arrays = [mx.concatenate(parts, axis=0) for parts in zip(*aligned, strict=True)]
        return cls(arrays, buffers[0].quantization)


def _with_position(array: mx.array, index: mx.array, part: mx.array) -> mx.array:
    """Return array `[B, H, capacity, n]` with part `[B, H, T, n]` from position `index` on, int32 `[1]`.

    `mx.slice_update` computes the offset in a kernel of its own. `mx.put_along_axis` takes one kernel on a GPU, but is
    slower on a CPU. It stores 16-bit elements in pairs, so rows must begin with a whole pair.
    """
    if ON_CPU or part.shape[2] > 1 or array.shape[3] * array.itemsize % 4:
        return mx.slice_update(array, part, index, (2,))
    return mx.put_along_axis(array, index[:, None, None, None], part, axis=2)


def zero_pad(x: mx.array, before: int, after: int) -> mx.array:
    """Pad x `[B, H, n, D]` with zero positions before and after."""
    parts = [mx.zeros((*x.shape[:2], count, x.shape[3]), x.dtype) for count in (before, after)]
    parts = [part for part in (parts[0], x, parts[1]) if part.shape[2]]
    return mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0] if parts else x
