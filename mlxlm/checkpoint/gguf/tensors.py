"""Tensors of a GGUF file as arrays, and arrays as the bytes of one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.gguf.parallel import parallel_map
from mlxlm.checkpoint.gguf.reader import TensorInfo, mmap_tensor
from mlxlm.checkpoint.lazy_tensor import LazyTensor
from mlxlm.utils.errors import CheckpointError

_PLAIN = {"F32": (np.float32, mx.float32), "F16": (np.uint16, mx.float16), "BF16": (np.uint16, mx.bfloat16)}
_EXPONENT = {"F16": 0x7C00, "BF16": 0x7F80}  # all of these bits are set in NaN and infinity, and in nothing else
_LARGEST_F16 = 65504
_CHUNK = 1 << 18  # weights at a time: 4 MB in float32, and as much again for each temporary of `gguf.quants`


def read_tensor(info: TensorInfo) -> LazyTensor:
    """A described tensor: float types as they are, the others dequantized to float32 when they are read."""
    kind = info.type.name
    if kind not in _PLAIN:
        return LazyTensor(info.shape, mx.float32, kind, info.nbytes, lambda: _dequantized(info))
    stored, dtype = _PLAIN[kind]

    def read() -> mx.array:
        with mmap_tensor(info) as rows:
            value = mx.array(rows.view(stored).reshape(info.shape))
        return value.view(dtype)

    return LazyTensor(info.shape, dtype, kind, info.nbytes, read)


def _dequantized(info: TensorInfo) -> mx.array:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[info.type.name]
    result = np.empty(info.shape, np.float32)
    flat = result.reshape(-1, info.shape[-1])
    with mmap_tensor(info) as rows:

        def fill(part: slice) -> None:
            with np.errstate(all="ignore"):  # hostile bytes can be scales that overflow
                flat[part] = dequantize(rows[part], kind)

        for _ in parallel_map(fill, _parts(*flat.shape)):
            pass
    return mx.array(result)


def encode_tensor(name: str, tensor: LazyTensor, kind: str) -> Iterator[bytes | memoryview]:
    """The bytes of a tensor in the type `kind`, a few rows at a time.

    Raises CheckpointError, naming the tensor, if a value is NaN or infinite, or too large for float16.
    """
    value = mx.contiguous(tensor.read())  # not the view that a transposition leaves
    rows = value.reshape(-1, value.shape[-1])
    chunks = (rows[part] for part in _parts(*rows.shape))
    if kind in _EXPONENT and value.dtype == _PLAIN[kind][1]:
        for chunk in chunks:
            bits = np.array(chunk.view(mx.uint16))
            if ((bits & _EXPONENT[kind]) == _EXPONENT[kind]).any():
                raise _not_finite(name)
            yield bits.data
        return
    checked = (_checked(name, chunk, kind) for chunk in chunks)
    if kind == "F32":
        yield from (chunk.data for chunk in checked)
    elif kind in _PLAIN:
        dtype = _PLAIN[kind][1]
        yield from (np.array(mx.array(chunk).astype(dtype).view(mx.uint16)).data for chunk in checked)
    else:
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import quantize

        ggml = GGMLQuantizationType[kind]
        yield from parallel_map(lambda chunk: quantize(chunk, ggml).data, checked)


def _checked(name: str, chunk: mx.array, kind: str) -> np.ndarray:
    """float32 rows whose values `kind` can hold."""
    values = np.array(chunk.astype(mx.float32))
    low, high = values.min(), values.max()  # a NaN anywhere is both
    if not (np.isfinite(low) and np.isfinite(high)):
        raise _not_finite(name)
    if kind == "F16" and max(high, -low) > _LARGEST_F16:
        raise CheckpointError(f"tensor {name} has values that are too large for F16", "BF16 or F32")
    return values


def _not_finite(name: str) -> CheckpointError:
    return CheckpointError(f"tensor {name} has values that are NaN or infinite", "an intact source")


def _parts(rows: int, width: int) -> Iterator[slice]:
    step = max(1, _CHUNK // width)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
