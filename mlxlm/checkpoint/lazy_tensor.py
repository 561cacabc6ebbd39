"""Tensors that are described but not read: what every format of checkpoint gives, and every writer takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from mlxlm.backend.mlx import mx


@dataclass(frozen=True)
class LazyTensor:
    """One tensor of a checkpoint.

    `read()` returns it as an array of `shape` and `dtype`, lazily where the format allows, and keeps nothing:
    a tensor that was read, used and dropped has left memory (one part of a fused tensor keeps the others for those who
    read them next: see `to_decoder_weights`). `stored` is the file's own word for its type
    ("BF16", "Q4_K") and `nbytes` what it takes there.
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
        """The same tensor with `function` applied to what is read; `shape` and `dtype` where that changes them."""
        read = self.read
        return replace(
            self,
            shape=self.shape if shape is None else shape,
            dtype=self.dtype if dtype is None else dtype,
            read=lambda: function(read()),
        )

    def astype(self, dtype: mx.Dtype) -> LazyTensor:
        """The same values in `dtype`."""
        return self if dtype == self.dtype else self.transform(lambda value: value.astype(dtype), dtype=dtype)


LazyTensors = Mapping[str, LazyTensor]

UNQUANTIZED_DTYPES = frozenset(("F64", "F32", "F16", "BF16"))  # stored types that hold the weights themselves


def lazy_tensor(value: mx.array) -> LazyTensor:
    """An array that is already in memory, or a graph that makes one."""
    name = str(value.dtype).removeprefix("mlx.core.")
    return LazyTensor(tuple(value.shape), value.dtype, name, value.nbytes, lambda: value)


def with_read_progress(tensors: LazyTensors, told: Callable[[int, int], None]) -> dict[str, LazyTensor]:
    """The same tensors, each telling when it is read how many bytes of all are done: `told(done, total)`."""
    total, done = sum(tensor.nbytes for tensor in tensors.values()), 0

    def telling(tensor: LazyTensor) -> LazyTensor:
        def tell(value: mx.array) -> mx.array:
            nonlocal done
            done = min(done + tensor.nbytes, total)  # a writer may read a tensor twice
            told(done, total)
            return value

        return tensor.transform(tell)

    return {name: telling(tensor) for name, tensor in tensors.items()}
