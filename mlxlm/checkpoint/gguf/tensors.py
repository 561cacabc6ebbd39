"""Read the tensors of a GGUF file as arrays, and encode arrays as its bytes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from mlxlm.backend import platform
from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.gguf.header import TensorInfo, mmap_tensor
from mlxlm.checkpoint.gguf.k_quants import K_QUANTS, USE_IMPORTANCE, quantize_k
from mlxlm.checkpoint.lazy_tensor import LazyTensor
from mlxlm.utils.errors import CheckpointError

T = TypeVar("T")
R = TypeVar("R")
_FLOAT_TYPES = {"F32": (np.float32, mx.float32), "F16": (np.uint16, mx.float16), "BF16": (np.uint16, mx.bfloat16)}
_EXPONENT_BITS = {"F16": 0x7C00, "BF16": 0x7F80}  # all set in NaN and infinity, and only there
_MAX_FLOAT16 = 65504
_CHUNK = 1 << 18  # weights at a time: 1 MB in float32, and as much again for each temporary of `gguf.quants`
_MAX_THREADS = 8  # each has a chunk and its temporaries; the disk is slower than eight


def read_tensor(info: TensorInfo) -> LazyTensor:
    """Describe a tensor: float types keep their dtype, the others are dequantized to float32 when they are read."""
    kind = info.type.name
    if kind not in _FLOAT_TYPES:
        return LazyTensor(info.shape, mx.float32, kind, info.nbytes, lambda: _dequantize(info))
    stored, dtype = _FLOAT_TYPES[kind]

    def read() -> mx.array:
        with mmap_tensor(info) as rows:
            value = mx.array(rows.view(stored).reshape(info.shape))
        return value.view(dtype)

    return LazyTensor(info.shape, dtype, kind, info.nbytes, read)


def _dequantize(info: TensorInfo) -> mx.array:
    result = np.empty(info.shape, np.float32)
    flat = result.reshape(-1, info.shape[-1])
    with mmap_tensor(info) as data:
        for part, values in dequantized_rows(info, data):
            flat[part] = values
    return mx.array(result)


def dequantized_rows(info: TensorInfo, data: np.ndarray) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield the rows of a quantized tensor in float32, a few at a time, and which they are.

    Args:
        info: The tensor.
        data: Its bytes, as `mmap_tensor` maps them.
    """
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[info.type.name]

    def rows(part: slice) -> tuple[slice, np.ndarray]:
        with np.errstate(all="ignore"):  # random bytes can be scales that overflow
            return part, dequantize(data[part], kind)

    return map_in_threads(rows, row_slices(len(data), info.shape[-1]))


def encode_tensor(
    name: str, tensor: LazyTensor, kind: str, importance: np.ndarray | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of a tensor in the type `kind`, a few rows at a time.

    Args:
        name: Its name, for errors.
        tensor: The tensor.
        kind: The type.
        importance: The mean square of the input of each column `[width]`, or those of each expert `[experts, width]`,
            for types in `USE_IMPORTANCE`.

    Raises:
        CheckpointError: Names the tensor if a value is NaN, infinite or too large for float16.
    """
    value = mx.contiguous(tensor.read())  # a transposed view has other strides
    rows = value.reshape(-1, value.shape[-1])
    chunks = (rows[part] for part in row_slices(*rows.shape))
    if kind in _EXPONENT_BITS and value.dtype == _FLOAT_TYPES[kind][1]:
        for chunk in chunks:
            bits = np.array(chunk.view(mx.uint16))
            if ((bits & _EXPONENT_BITS[kind]) == _EXPONENT_BITS[kind]).any():
                raise _not_finite(name)
            yield bits.data
        return
    checked = (_checked_float32(name, chunk, kind) for chunk in chunks)
    if kind == "F32":
        yield from (chunk.data for chunk in checked)
    elif kind in _FLOAT_TYPES:
        dtype = _FLOAT_TYPES[kind][1]
        yield from (np.array(mx.array(chunk).astype(dtype).view(mx.uint16)).data for chunk in checked)
    elif kind in K_QUANTS or (kind in USE_IMPORTANCE and importance is not None):
        parts: Iterable[np.ndarray | None] = itertools.repeat(None)
        if importance is not None:
            experts = importance.reshape(-1, importance.shape[-1])
            per_expert, numbers = rows.shape[0] // len(experts), np.arange(rows.shape[0])
            parts = (experts[numbers[part] // per_expert] for part in row_slices(*rows.shape))
        pairs = zip(checked, parts, strict=False)
        yield from map_in_threads(lambda pair: quantize_k(pair[0], kind, pair[1]).data, pairs)
    else:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import quantize

        ggml = GGMLQuantizationType[kind]
        yield from map_in_threads(lambda chunk: quantize(chunk, ggml).data, checked)


def mxfp4_blocks(weight: mx.array, scales: mx.array) -> bytes:
    """The blocks of a matrix, or a stack of them, in MLX's format mxfp4: packed uint32 weights, and uint8 scales.

    A block has its scale first. MLX's bytes have two neighbors each, those of a block values 0 and 16, 1 and 17, ...
    """
    pairs = np.array(weight.view(mx.uint8)).reshape(-1, 16)
    values = np.stack([pairs & 0x0F, pairs >> 4], axis=-1).reshape(-1, 32)
    return np.hstack([np.array(scales).reshape(-1, 1), values[:, :16] | values[:, 16:] << 4]).tobytes()


def map_in_threads(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """As `map`, in threads and with few results in memory; NumPy releases the GIL while it computes."""
    rest = iter(items)
    with ThreadPoolExecutor(min(platform.cpu_cores(), _MAX_THREADS), thread_name_prefix="gguf") as pool:
        while batch := list(itertools.islice(rest, 4 * _MAX_THREADS)):
            yield from pool.map(function, batch)


def _checked_float32(name: str, chunk: mx.array, kind: str) -> np.ndarray:
    """float32 rows, after checking that `kind` can represent the values."""
    values = np.array(chunk.astype(mx.float32))
    low, high = values.min(), values.max()  # both are NaN if any value is
    if not (np.isfinite(low) and np.isfinite(high)):
        raise _not_finite(name)
    if kind == "F16" and max(high, -low) > _MAX_FLOAT16:
        raise CheckpointError(f"tensor {name} has values that are too large for F16", "BF16 or F32")
    return values


def _not_finite(name: str) -> CheckpointError:
    return CheckpointError(f"tensor {name} has values that are NaN or infinite", "an undamaged source")


def row_slices(rows: int, width: int) -> Iterator[slice]:
    """Divide rows of `width` weights into slices of about a quarter of a million weights."""
    step = max(1, _CHUNK // width)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
