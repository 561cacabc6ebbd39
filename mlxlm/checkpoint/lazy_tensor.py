"""Tensors that are described but not yet read: the form between all readers and writers of checkpoints.

Values are compared through their bits: on a CPU, MLX needs 160 ms for the maximum of 33 million bfloat16 values, NumPy
9 ms for that of their bits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.utils.errors import CheckpointError, os_errors_as


@dataclass(frozen=True)
class LazyTensor:
    """One tensor of a checkpoint.

    Attributes:
        shape: Shape of the array.
        dtype: Dtype of the array.
        stored_dtype: The file's name for its type ("BF16", "Q4_K").
        nbytes: Bytes in the file; of a matrix that is packed in another format, those of the array.
        read: Returns the array, lazily where the format allows. Nothing is cached, so an array that is no longer
            used is freed (except for the parts of a fused tensor, see `to_decoder_weights`, and of a packed matrix,
            see `gguf.affine.packed_tensors`).
    """

    shape: tuple[int, ...]
    dtype: mx.Dtype
    stored_dtype: str
    nbytes: int
    read: Callable[[], mx.array] = field(repr=False)

    def transform(
        self,
        function: Callable[[mx.array], mx.array],
        shape: tuple[int, ...] | None = None,
        dtype: mx.Dtype | None = None,
    ) -> LazyTensor:
        """Return a tensor that applies `function` to the array; give `shape` and `dtype` if it changes them."""
        read = self.read
        return replace(
            self,
            shape=self.shape if shape is None else shape,
            dtype=self.dtype if dtype is None else dtype,
            read=lambda: function(read()),
        )

    def part(self, axis: int, ranges: Sequence[tuple[int, int]]) -> LazyTensor:
        """Return the values in these ranges of `axis`, concatenated. Of a tensor in a file, only they are read."""
        axis, whole = axis % len(self.shape), self.read
        where = [(*[slice(None)] * axis, slice(*limits)) for limits in ranges]
        size = sum(end - first for first, end in ranges)
        shape = (*self.shape[:axis], size, *self.shape[axis + 1 :])

        def read() -> mx.array:
            if isinstance(whole, FileTensor):
                values = [whole.read_part(slices) for slices in where]
            else:
                array = whole()
                values = [array[slices] for slices in where]
            value = mx.contiguous(mx.concatenate(values, axis) if len(values) > 1 else values[0])
            mx.eval(value)  # a lazy one would keep the whole tensor until it is used
            return value

        return replace(self, shape=shape, nbytes=self.nbytes * size // self.shape[axis], read=read)

    def astype(self, dtype: mx.Dtype) -> LazyTensor:
        """Return a tensor that converts the array to `dtype`."""
        return self if dtype == self.dtype else self.transform(lambda value: value.astype(dtype), dtype=dtype)


LazyTensors = Mapping[str, LazyTensor]


@dataclass(frozen=True)
class FileTensor:
    """Reads a tensor of a file, or a part of it.

    Attributes:
        path: The file, in which the tensor's values are contiguous.
        shape: Shape of the tensor.
        dtype: Its dtype.
        offset: Where its values begin, in bytes.
        read: Returns all of it, lazily.
    """

    path: Path
    shape: tuple[int, ...]
    dtype: mx.Dtype
    offset: int
    read: Callable[[], mx.array]

    def __call__(self) -> mx.array:
        """Return the whole tensor, lazily."""
        return self.read()

    def read_part(self, where: tuple[slice, ...]) -> mx.array:
        """Return the values at `where`. Raises CheckpointError if the file has become shorter."""
        unsigned = np.dtype(f"u{self.dtype.size}")
        try:
            with os_errors_as(CheckpointError, "read", self.path):
                values = np.memmap(self.path, unsigned, "r", self.offset, self.shape)[where]
        except ValueError:
            raise CheckpointError(f"{self.path} has become shorter since it was opened") from None
        return mx.array(np.ascontiguousarray(values)).view(self.dtype)  # else MLX allocates all that is between them


UNQUANTIZED_DTYPES = frozenset(("F64", "F32", "F16", "BF16"))  # stored types of unquantized weights


def lazy_tensor(value: mx.array) -> LazyTensor:
    """Wrap an array, evaluated or not."""
    name = str(value.dtype).removeprefix("mlx.core.")
    return LazyTensor(tuple(value.shape), value.dtype, name, value.nbytes, lambda: value)


def read_array(path: Path, dtype: Any, count: int, offset: int) -> np.ndarray:
    """Read `count` values of a file. Raises CheckpointError if it has become shorter since it was opened."""
    with os_errors_as(CheckpointError, "read", path):
        values = np.fromfile(path, dtype, count, offset=offset)
    if values.size != count:
        raise CheckpointError(f"{path} has become shorter since it was opened")
    return values


def memory_size(tensors: Iterable[LazyTensor]) -> int:
    """Bytes of the arrays, which differ from those in the file for weights that are dequantized."""
    return sum(math.prod(tensor.shape) * tensor.dtype.size for tensor in tensors)


def dtype_sizes(tensors: Iterable[LazyTensor]) -> Counter[str]:
    """Bytes in the file by dtype ("bfloat16")."""
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        sizes[str(tensor.dtype).removeprefix("mlx.core.")] += tensor.nbytes
    return sizes


def with_read_progress(tensors: LazyTensors, on_progress: Callable[[int, int], None]) -> dict[str, LazyTensor]:
    """Return tensors that call `on_progress(bytes read, total bytes)` when they are read."""
    total, done = sum(tensor.nbytes for tensor in tensors.values()), 0

    def report_reads(tensor: LazyTensor) -> LazyTensor:
        def report(value: mx.array) -> mx.array:
            nonlocal done
            done = min(done + tensor.nbytes, total)  # a writer may read a tensor twice
            on_progress(done, total)
            return value

        return tensor.transform(report)

    return {name: report_reads(tensor) for name, tensor in tensors.items()}


_UNSIGNED = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


def bits_of(value: mx.array) -> np.ndarray:
    """The bits of an array as unsigned integers, without a copy where NumPy can view MLX's memory."""
    return np.array(mx.contiguous(value).view(_UNSIGNED[value.dtype.size]), copy=False)


def bitwise_equal(a: mx.array, b: mx.array) -> bool:
    """Whether two arrays of the same shape and dtype have the same bits."""
    return np.array_equal(bits_of(a), bits_of(b))


def max_abs(value: mx.array) -> float:
    """The largest absolute value of float16, bfloat16 or float32 values; NaN if any is NaN.

    Without the sign, the bits of floats sort like their values, with NaN above infinity.
    """
    bits = bits_of(value)
    if not bits.size:
        return 0.0
    top = 1 << (8 * bits.itemsize - 1)
    positive = int(bits.view(f"i{bits.itemsize}").max())
    highest = int(bits.max())
    magnitude = max(positive, highest - top if highest >= top else 0)
    if value.dtype == mx.float16:
        return float(np.uint16(magnitude).view(np.float16))
    return float(np.uint32(magnitude << 16 if bits.itemsize == 2 else magnitude).view(np.float32))
