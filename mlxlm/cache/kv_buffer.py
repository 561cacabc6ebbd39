"""The buffers of a cache: keys or values of all rows, plain or quantized."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mlxlm.backend.mlx import mx
from mlxlm.kernels import QuantizedKV
from mlxlm.kernels.metal import FLOATS
from mlxlm.utils.errors import GenerationError

GROUP_SIZES = (64, 32)  # sizes of a group, the preferred one first


def group_size(*dims: int) -> int:
    """Values that share a scale: 64, or 32 where 64 doesn't divide every head dim of `dims`.

    Raises GenerationError where neither does.
    """
    for size in GROUP_SIZES:
        if all(dim % size == 0 for dim in dims):
            return size
    found = " and ".join(str(dim) for dim in sorted(set(dims)))
    raise GenerationError(
        f"a cache of head dim {found} can't be quantized, which takes a multiple of 32", "no bits for the cache"
    )


class KVBuffer:
    """Positions of `[B, H, capacity, D]`, in arrays that share the first three axes: one, or the three of
    `mx.quantize`."""

    __slots__ = ("arrays", "bits", "group")

    def __init__(self, arrays: Sequence[mx.array], bits: int | None, group: int | None) -> None:
        self.arrays, self.bits, self.group = list(arrays), bits, group

    @classmethod
    def like(cls, x: mx.array, bits: int | None, group: int | None) -> KVBuffer:
        """An empty one for positions as those of x `[B, H, T, D]`."""
        empty = x[:, :, :0]
        if bits is None:
            return cls([empty], None, None)
        words = empty.astype(mx.uint32)[..., : x.shape[3] * bits // 32]
        scales = empty[..., : x.shape[3] // group]
        return cls([words, scales, scales], bits, group)

    @property
    def rows(self) -> int:
        return self.arrays[0].shape[0]

    @property
    def capacity(self) -> int:
        return self.arrays[0].shape[2]

    @property
    def shape(self) -> tuple[int, ...]:
        """`[B, H, capacity, D]`"""
        width = self.arrays[-1].shape[3]
        return (*self.arrays[0].shape[:3], width if self.bits is None else width * self.group)

    @property
    def dtype(self) -> mx.Dtype:
        """Of what it is given."""
        return self.arrays[-1].dtype

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.arrays)

    def quantize(self, x: mx.array) -> Sequence[mx.array]:
        """x `[B, H, T, D]` as the arrays hold it."""
        return [x] if self.bits is None else QuantizedKV.of(x, self.bits, self.group).arrays

    def write(self, first: int, end: int, x: mx.array) -> None:
        """Put x `[B, H, end - first, D]` at these positions, in place unless someone else has the buffers."""
        if self.bits is None:
            self.arrays[0][..., first:end, :] = x
            return
        for array, slice_row in zip(self.arrays, self.quantize(x), strict=True):
            array[..., first:end, :] = slice_row

    def write_to_row(self, row: int, first: int, parts: Sequence[mx.array]) -> None:
        """Put encoded positions of one row there from `first` on."""
        for array, slice_row in zip(self.arrays, parts, strict=True):
            array[row : row + 1, :, first : first + slice_row.shape[2]] = slice_row

    def read(self, first: int, end: int) -> mx.array | QuantizedKV:
        if self.bits is None:
            return self.arrays[0][..., first:end, :]
        return QuantizedKV(*(x[..., first:end, :] for x in self.arrays), self.bits, self.group)

    def dequantized(self) -> mx.array:
        """All positions in the dtype that they came in."""
        held = self.read(0, self.capacity)
        return held if self.bits is None else held.dequantized()

    def slice_row(self, row: int, first: int, end: int) -> KVBuffer:
        """Positions of one row in buffers of their own."""
        return self.map_arrays(lambda x: mx.contiguous(x[row : row + 1, :, first:end]))

    def map_arrays(self, change: Callable[[mx.array], mx.array]) -> KVBuffer:
        """Another one, of changed arrays."""
        return KVBuffer([change(x) for x in self.arrays], self.bits, self.group)

    def resize(self, first: int, end: int, capacity: int) -> KVBuffer:
        """Another one, whose first positions are those from `first` to `end` here."""
        return self.map_arrays(lambda x: zero_pad(x[:, :, first:end], 0, capacity - (end - first)))

    @classmethod
    def of(cls, arrays: Sequence[mx.array], bits: int | None) -> KVBuffer:
        """One of these arrays. Raises ValueError for arrays that none can have."""
        whole = len({x.shape[:3] for x in arrays}) == 1 and all(x.ndim == 4 and x.shape[3] for x in arrays)
        whole = whole and all(x.dtype in FLOATS for x in (arrays if bits is None else arrays[1:]))
        group = None
        if bits is not None and whole:
            packed, scales, biases = arrays
            group = packed.shape[3] * 32 // bits // scales.shape[3]
            widths = packed.shape[3] * 32, biases.shape[3]
            whole = packed.dtype == mx.uint32 and scales.dtype == biases.dtype
            whole = whole and group in GROUP_SIZES and widths == (scales.shape[3] * group * bits, scales.shape[3])
        if not whole:
            found = ", ".join(f"{x.shape} {x.dtype}" for x in arrays)
            raise ValueError(f"no keys or values of {'their own dtype' if bits is None else f'{bits} bits'}: {found}")
        return cls(arrays, bits, group)

    @classmethod
    def stack(cls, stores: Sequence[KVBuffer]) -> KVBuffer:
        """The rows of all these, aligned at the end."""
        longest = max(store.capacity for store in stores)
        aligned = [store.map_arrays(lambda x: zero_pad(x, longest - x.shape[2], 0)).arrays for store in stores]
        arrays = [mx.concatenate(parts, axis=0) for parts in zip(*aligned, strict=True)]
        return cls(arrays, stores[0].bits, stores[0].group)


def zero_pad(x: mx.array, before: int, after: int) -> mx.array:
    """Zeros around the positions of x `[B, H, n, D]`."""
    parts = [mx.zeros((*x.shape[:2], count, x.shape[3]), x.dtype) for count in (before, after)]
    parts = [slice_row for slice_row in (parts[0], x, parts[1]) if slice_row.shape[2]]
    return mx.concatenate(parts, axis=2) if len(parts) > 1 else parts[0] if parts else x
