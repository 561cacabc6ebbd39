"""Tensors of a GGUF file as arrays, and arrays as the bytes of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from mlxlm._mlx import mx
from mlxlm.checkpoint.gguf.reader import Info, mapped
from mlxlm.checkpoint.tensors import Tensor
from mlxlm.errors import CheckpointError

_PLAIN = {"F32": (np.float32, mx.float32), "F16": (np.float16, mx.float16), "BF16": (np.uint16, mx.bfloat16)}
_CHUNK = 1 << 22  # weights at a time: 16 MB in float32, and as much again for each temporary of `gguf.quants`


def tensor_of(info: Info) -> Tensor:
    """A described tensor: float types as they are, the others dequantized to float32 when they are read."""
    kind = info.type.name
    if kind not in _PLAIN:
        return Tensor(info.shape, mx.float32, kind, info.nbytes, lambda: _dequantized(info))
    stored, dtype = _PLAIN[kind]

    def read() -> mx.array:
        with mapped(info) as rows:
            value = mx.array(rows.view(stored).reshape(info.shape))
        return value.view(dtype) if value.dtype != dtype else value

    return Tensor(info.shape, dtype, kind, info.nbytes, read)


def _dequantized(info: Info) -> mx.array:
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind = GGMLQuantizationType[info.type.name]
    result = np.empty(info.shape, np.float32)
    flat = result.reshape(-1, info.shape[-1])
    with mapped(info) as rows, np.errstate(all="ignore"):  # random bytes can be scales that overflow
        for part in _parts(len(flat), info.shape[-1]):
            flat[part] = dequantize(rows[part], kind)
    return mx.array(result)


def encoded(name: str, tensor: Tensor, kind: str) -> Iterator[bytes]:
    """The bytes of a tensor in the type `kind`, a few rows at a time.

    Raises CheckpointError, naming the tensor, if a value is NaN or infinite, or too large for float16.
    """
    value = tensor.read()
    rows = value.reshape(-1, value.shape[-1])
    encode = _encoder(kind)
    for part in _parts(*rows.shape):
        chunk = rows[part].astype(mx.float32)
        if not mx.isfinite(chunk).all().item():
            raise CheckpointError(f"tensor {name} has values that are NaN or infinite", "an intact source")
        if kind == "F16" and mx.abs(chunk).max().item() > 65504:
            raise CheckpointError(f"tensor {name} has values that are too large for F16", "BF16 or F32")
        yield encode(chunk)


def _encoder(kind: str) -> Callable[[mx.array], bytes]:
    """float32 rows -> their bytes."""
    if kind == "F32":
        return lambda rows: np.array(rows).tobytes()
    if kind == "F16":
        return lambda rows: np.array(rows.astype(mx.float16)).tobytes()
    if kind == "BF16":
        return lambda rows: np.array(rows.astype(mx.bfloat16).view(mx.uint16)).tobytes()
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import quantize

    return lambda rows: quantize(np.array(rows), GGMLQuantizationType[kind]).tobytes()


def _parts(rows: int, width: int) -> Iterator[slice]:
    step = max(1, _CHUNK // width)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
