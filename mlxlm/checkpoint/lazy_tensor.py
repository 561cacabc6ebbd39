"""Tensors that are described but not yet read: the form between all readers and writers of checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from mlxlm.backend.mlx import mx


@dataclass(frozen=True)
class LazyTensor:
    """One tensor of a checkpoint.

    Attributes:
        shape: Shape of the array.
        dtype: Dtype of the array.
        stored_dtype: The file's name for its type ("BF16", "Q4_K").
        nbytes: Bytes in the file.
        read: Returns the array, lazily where the format allows. Nothing is cached, so an array that is no longer
            used is freed (except for the parts of a fused tensor, see `to_decoder_weights`).
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

    def astype(self, dtype: mx.Dtype) -> LazyTensor:
        """Return a tensor that converts the array to `dtype`."""
        return self if dtype == self.dtype else self.transform(lambda value: value.astype(dtype), dtype=dtype)


LazyTensors = Mapping[str, LazyTensor]

UNQUANTIZED_DTYPES = frozenset(("F64", "F32", "F16", "BF16"))  # stored types of unquantized weights


def lazy_tensor(value: mx.array) -> LazyTensor:
    """Wrap an array, evaluated or not."""
    name = str(value.dtype).removeprefix("mlx.core.")
    return LazyTensor(tuple(value.shape), value.dtype, name, value.nbytes, lambda: value)


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
