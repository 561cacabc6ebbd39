"""Read safetensors files, checked before MLX maps them, and write them tensor by tensor.

The safetensors package checks headers; its writer needs all tensors in memory, and MLX's reader trusts its input.
Format: 8 bytes of header length (little-endian), a JSON header with dtype, shape and offsets of each
tensor, then the data (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.lazy_tensor import FileTensor, LazyTensor, LazyTensors, bits_of, lazy_tensor, max_abs
from mlxlm.checkpoint.locations import MODEL_FILE, SAFETENSORS_INDEX
from mlxlm.checkpoint.sharded import sharded_tensors
from mlxlm.utils.bounded_reads import open_regular
from mlxlm.utils.digests import HashingWriter
from mlxlm.utils.errors import CheckpointError, short_repr
from mlxlm.utils.files import atomic_write
from mlxlm.utils.json_files import write_json

SHARD_BYTES = 5_000_000_000

# Dtypes that MLX reads, by the format's names; it returns 8-bit floats as bytes.
DTYPES = {
    "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "F8_E4M3": mx.uint8, "F8_E8M0": mx.uint8,
    "I64": mx.int64, "I32": mx.int32, "I16": mx.int16, "I8": mx.int8,
    "U64": mx.uint64, "U32": mx.uint32, "U16": mx.uint16, "U8": mx.uint8, "BOOL": mx.bool_,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items() if not name.startswith("F8")}

# A header has about 120 bytes per tensor and needs about 10 times that in memory. The largest files in use, 5 GB shards
# of models with hundreds of experts, have a few thousand tensors.
_MAX_HEADER = 8_000_000
_MAX_DIMENSIONS = 8


def file_tensors(path: Path) -> dict[str, LazyTensor]:
    """Describe the tensors of one file; see `file_header`."""
    return file_header(path)[0]


def file_header(path: Path) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Read the header of one file, and check that it has all bytes of all tensors.

    Returns:
        The tensors and the metadata.

    Raises:
        CheckpointError: Names the file, the tensor and what is wrong with it.
    """
    with open_regular(path, CheckpointError) as file:
        length = int.from_bytes(file.read(8), "little")
    if _MAX_HEADER < length < path.stat().st_size:
        raise CheckpointError(f"{path}: the header has {length} bytes, at most {_MAX_HEADER} are possible")
    arrays, offset = _LazyArrays(path), 8 + length
    tensors = {}
    try:
        with safe_open(path, "numpy") as reader:
            metadata = reader.metadata() or {}
            parts = {name: reader.get_slice(name) for name in reader.offset_keys()}
            entries = {name: (part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()}
    except (SafetensorError, OSError) as error:
        hint = "copy or download the file again"
        raise CheckpointError(f"{path} is not a valid safetensors file: {str(error)[:200]}", hint) from None
    for name, (stored_dtype, shape) in entries.items():
        if (dtype := DTYPES.get(stored_dtype)) is None:
            raise CheckpointError(
                f"{path}: tensor {name} is of type {stored_dtype}, which MLX doesn't read",
                "a checkpoint in bfloat16, float16 or float32",
            )
        if len(shape) > _MAX_DIMENSIONS or max(shape, default=0) >= 2**31:
            raise CheckpointError(f"{path}: tensor {name} has an impossible shape: {short_repr(list(shape))}")
        nbytes = math.prod(shape) * dtype.size
        read = FileTensor(path, shape, dtype, offset, partial(arrays.read, name))
        tensors[name] = LazyTensor(shape, dtype, stored_dtype, nbytes, read)
        offset += nbytes  # the format has no gaps
    return tensors, metadata


def folder_tensors(folder: Path) -> dict[str, LazyTensor]:
    """Describe all tensors of a model folder.

    They are those of `model.safetensors.index.json` if there is one, else of `model.safetensors`, else of all
    `model*.safetensors`.

    Raises:
        CheckpointError: Names the file and the tensor.
    """
    whole = folder / MODEL_FILE  # others are variants of it: model.fp16.safetensors
    files = [whole] if whole.exists() else sorted(folder.glob("model*.safetensors"))
    return sharded_tensors(folder / SAFETENSORS_INDEX, files, file_tensors)


def load_weights(folder: Path) -> dict[str, mx.array]:
    """Load all tensors of a model folder lazily. Raises as `folder_tensors` does."""
    return {name: tensor.read() for name, tensor in folder_tensors(folder).items()}


def save_weights(folder: Path, weights: Mapping[str, mx.array], shard_bytes: int = SHARD_BYTES) -> None:
    """Write a model's arrays to a folder; see `write_shards`."""
    write_shards(folder, {name: lazy_tensor(value) for name, value in weights.items()}, shard_bytes)


def write_shards(
    folder: Path, tensors: LazyTensors, shard_bytes: int = SHARD_BYTES, finite: bool = False, format: str = "mlx"
) -> None:
    """Write `model.safetensors`, or shards of at most `shard_bytes` and their index with Hugging Face's names.

    A larger tensor gets a shard of its own. One tensor is in memory at a time. See `write_tensors` for the other
    arguments and the errors.
    """
    shards: list[dict[str, LazyTensor]] = [{}]
    filled = total = 0
    for name, tensor in tensors.items():
        nbytes = _nbytes(tensor)
        if shards[-1] and filled + nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += nbytes
        total += nbytes
    if len(shards) == 1:
        write_file(folder / MODEL_FILE, tensors, finite, format)
        return
    weight_map = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        write_file(folder / file, shard, finite, format)
        weight_map.update(dict.fromkeys(shard, file))
    write_json(folder / SAFETENSORS_INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_file(path: Path, tensors: LazyTensors, finite: bool = False, format: str = "mlx") -> None:
    """Write one safetensors file atomically: lazy values may still be read from the file that it replaces.

    See `write_tensors` for the arguments. Raises CheckpointError also if the disk is full.
    """
    with atomic_write(path) as file:
        write_tensors(file, path, tensors, finite, format)


def write_hashed(path: Path, tensors: LazyTensors, format: str = "mlx") -> str:
    """As `write_file`; returns the file's SHA-256."""
    with atomic_write(path) as file:
        hashing = HashingWriter(file)
        write_tensors(hashing, path, tensors, format=format)
    return hashing.hexdigest()


def write_tensors(
    file: BinaryIO | HashingWriter,
    path: Path,
    tensors: LazyTensors,
    finite: bool = False,
    format: str = "mlx",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the content of a safetensors file, one tensor in memory at a time.

    Args:
        file: An open file.
        path: Its name, for errors.
        tensors: The tensors by name.
        finite: Raise for values that are not finite.
        format: The metadata's "format"; transformers needs "pt".
        metadata: More metadata.

    Raises:
        CheckpointError: Names a tensor that can't be read, isn't finite or has a dtype that safetensors lacks.
    """
    order = _order(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": format, **(metadata or {})}}
    end = 0
    for name in order:
        tensor, start = tensors[name], end
        if tensor.dtype not in DTYPE_NAMES:
            raise CheckpointError(f"{path}: tensor {name} is {tensor.dtype}, which safetensors doesn't support")
        end += _nbytes(tensor)
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    raw = json.dumps(header, ensure_ascii=False).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    file.write(struct.pack("<Q", len(raw)) + raw)
    for name in order:
        file.write(_bytes_of(tensors[name], name, path, finite))


def _order(tensors: LazyTensors) -> list[str]:
    """Order the data so that each tensor starts at a multiple of its element size.

    That is the given order except for tensors with odd sizes, so that the parts of a quantized matrix, which are
    computed together, stay together.
    """

    def key(name: str) -> tuple[int, int]:
        size = tensors[name].dtype.size
        return (0, 0) if size > 4 else (1, 0) if _nbytes(tensors[name]) % 4 == 0 else (2, -size)

    return sorted(tensors, key=key)


def as_float32(value: mx.array) -> mx.array:
    """Convert floating-point values to float32, leave others unchanged."""
    return value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value


class _LazyArrays:
    """Returns the lazy arrays of one file, each once.

    An evaluated array keeps its values, so reading a tensor again needs a new array.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unread: dict[str, mx.array] = {}

    def read(self, name: str) -> mx.array:
        try:
            if name not in self.unread:
                self.unread = mx.load(str(self.path), format="safetensors")
            return self.unread.pop(name)
        except (RuntimeError, ValueError, KeyError) as error:  # it has changed since its header was read
            raise CheckpointError(f"{self.path}: tensor {name} can't be read: {error}") from None


def _nbytes(tensor: LazyTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.size


def _bytes_of(tensor: LazyTensor, name: str, path: Path, finite: bool) -> bytes | memoryview:
    value = tensor.read()
    assert (tuple(value.shape), value.dtype) == (tuple(tensor.shape), tensor.dtype), name
    if value.size == 0:
        return b""
    try:
        raw = bits_of(value)
    except RuntimeError as error:
        raise CheckpointError(f"{path}: tensor {name} can't be read: {error}") from None
    if finite and mx.issubdtype(value.dtype, mx.floating) and not max_abs(value) < math.inf:
        raise CheckpointError(f"{path}: tensor {name} has values that are not finite")
    return raw.data.cast("B")
