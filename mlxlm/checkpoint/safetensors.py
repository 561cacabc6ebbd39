"""safetensors files: checked before MLX reads them, and written tensor by tensor.

Format: 8 bytes of header length (little-endian), a JSON header with dtype, shape and offsets of each
tensor, then the data (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.bits import max_abs
from mlxlm.checkpoint.lazy_tensor import LazyTensor, LazyTensors, lazy_tensor
from mlxlm.checkpoint.locations import MODEL_FILE
from mlxlm.checkpoint.sharded import indexed_tensors, joined_tensors, json_object
from mlxlm.utils.bounded_reads import open_regular
from mlxlm.utils.digests import HashingWriter
from mlxlm.utils.errors import CheckpointError, os_errors_as, short_repr
from mlxlm.utils.json_files import write_json

SHARD_BYTES = 5_000_000_000
INDEX = "model.safetensors.index.json"
_FILES = "model*.safetensors"

# What MLX reads, by the format's names. It gives 8-bit floats as bytes.
DTYPES = {
    "F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16, "F8_E4M3": mx.uint8, "F8_E8M0": mx.uint8,
    "I64": mx.int64, "I32": mx.int32, "I16": mx.int16, "I8": mx.int8,
    "U64": mx.uint64, "U32": mx.uint32, "U16": mx.uint16, "U8": mx.uint8, "BOOL": mx.bool_,
}  # fmt: skip
_BITS = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}  # by bytes, for types that numpy lacks
_NAMES = {dtype: name for name, dtype in DTYPES.items() if not name.startswith("F8")}

# A header is about 120 bytes a tensor and becomes some 10 times that in memory. The largest files in use, 5 GB
# shards of models with hundreds of experts, have a few thousand tensors.
_MAX_HEADER = 8_000_000
_MAX_DIMENSIONS = 8


def check_file(path: Path) -> list[str]:
    """The names of a file's tensors, after checking that every byte they claim is there.

    Raises CheckpointError naming the file and what is wrong with it. Reads the header only.
    """
    return list(file_tensors(path))


def file_tensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of one file, described; every byte they claim is there. Raises as `check_file` does."""
    return file_header(path)[0]


def file_header(path: Path) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """`file_tensors` and the metadata of one file. Raises as `check_file` does."""
    with open_regular(path, CheckpointError) as file:
        size = path.stat().st_size
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 2 <= length <= size - 8:
            raise CheckpointError(f"{path} is not a whole safetensors file: its header is cut off")
        if length > _MAX_HEADER:
            raise CheckpointError(f"{path}: a header of {length} bytes; {_MAX_HEADER} are more than any model has")
        raw = file.read(length)
    header = json_object(raw, f"{path}: the safetensors header")
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata  # MLX writes null where it was given none
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{path}: malformed safetensors header (__metadata__ is not an object of texts)")
    reader = _Reader(path)
    tensors, spans = {}, []
    for name, entry in header.items():
        dtype, shape, first, last = _entry(path, name, entry)
        if 8 + length + last > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {name} ends {8 + length + last - size} bytes past the end",
                "copy or download the file again",
            )
        if first < last:
            spans.append((first, last, name))
        tensors[name] = LazyTensor(shape, DTYPES[dtype], dtype, last - first, reader.of(name))
    spans.sort()
    for (_, end, name), (first, _, other) in pairwise(spans):
        if first < end:
            raise CheckpointError(f"{path}: tensors {name} and {other} overlap")
    return tensors, metadata


def has_weights(folder: Path) -> bool:
    """Whether a folder has a model's safetensors, or their index."""
    return (folder / INDEX).exists() or any(folder.glob(_FILES))


def folder_tensors(folder: Path) -> dict[str, LazyTensor]:
    """All tensors of a model folder: by `model.safetensors.index.json` where there is one, else of
    `model.safetensors`, else of every `model*.safetensors`. Raises CheckpointError naming the file and the tensor."""
    if (folder / INDEX).exists():
        return indexed_tensors(folder / INDEX, file_tensors)
    if (folder / MODEL_FILE).exists():  # what lies beside it are variants: model.fp16.safetensors
        return joined_tensors([folder / MODEL_FILE], file_tensors)
    if not (files := sorted(folder.glob(_FILES))):
        wanted = "model*.safetensors, pytorch_model*.bin or .gguf file"
        raise CheckpointError(f"{folder} has no {wanted}", "the folder of a model or of a run")
    return joined_tensors(files, file_tensors)


def load_weights(folder: Path) -> dict[str, mx.array]:
    """All tensors of a model folder, read on first use. Raises as `folder_tensors` does."""
    return {name: tensor.read() for name, tensor in folder_tensors(folder).items()}


def save_weights(folder: Path, weights: Mapping[str, mx.array], shard_bytes: int = SHARD_BYTES) -> None:
    """Write a model's arrays; see `write_shards`."""
    write_shards(folder, {name: lazy_tensor(value) for name, value in weights.items()}, shard_bytes)


def save_tensors(path: Path, tensors: Mapping[str, mx.array]) -> None:
    """One safetensors file of arrays; see `write_file`."""
    write_file(path, {name: lazy_tensor(value) for name, value in tensors.items()})


def write_shards(
    folder: Path, tensors: LazyTensors, shard_bytes: int = SHARD_BYTES, finite: bool = False, format: str = "mlx"
) -> None:
    """Write `model.safetensors`, or shards of at most `shard_bytes` with an index as Hugging Face names them.

    A single tensor larger than that gets a shard of its own. One tensor is in memory at a time. Raises as
    `write_file` does.
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
    write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_file(path: Path, tensors: LazyTensors, finite: bool = False, format: str = "mlx") -> None:
    """One safetensors file, by `write_tensors`. It appears whole or not at all; one process may write it at a time.

    Raises as `write_tensors` does, and CheckpointError naming the file if the disk refuses.
    """
    with _appearing(path) as file:
        write_tensors(file, path, tensors, finite, format)


def write_hashed(path: Path, tensors: LazyTensors, format: str = "mlx") -> str:
    """`write_file`; returns the file's SHA-256."""
    with _appearing(path) as file:
        hashing = HashingWriter(file)
        write_tensors(hashing, path, tensors, format=format)
    return hashing.hexdigest()


@contextmanager
def _appearing(path: Path) -> Iterator[BinaryIO]:
    """A file to fill, which becomes `path` at the end. Raises CheckpointError if the disk refuses."""
    partial = path.with_name(f".{path.name}.partial")  # `path` may be where lazy values still come from
    with os_errors_as(CheckpointError, "write", path):
        try:
            with partial.open("wb") as file:
                yield file
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def write_tensors(
    file: BinaryIO | HashingWriter,
    path: Path,
    tensors: LazyTensors,
    finite: bool = False,
    format: str = "mlx",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """The content of a safetensors file, tensor by tensor, into one that is open and will be at `path`. `finite`:
    values must be. `format` is what the metadata says the values are for: transformers wants "pt". `metadata` is more
    of it.

    Raises CheckpointError naming the tensor that can't be read or isn't finite.
    """
    order = _order(tensors)
    header: dict[str, Any] = {"__metadata__": {"format": format, **(metadata or {})}}
    end = 0
    for name in order:
        tensor, start = tensors[name], end
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"{path}: tensor {name} is {tensor.dtype}, which safetensors doesn't keep")
        end += _nbytes(tensor)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    raw = json.dumps(header, ensure_ascii=False).encode("utf-8")
    raw += b" " * (-len(raw) % 8)
    file.write(struct.pack("<Q", len(raw)) + raw)
    for name in order:
        file.write(_bytes_of(tensors[name], name, path, finite))


def _order(tensors: LazyTensors) -> list[str]:
    """The order of the data, in which each tensor begins at a multiple of its element's size.

    A quantized matrix's parts, which are made together, stay together where their bytes allow it: else all scales
    would wait in memory until the last matrix is written. Then come the others, larger elements first.
    """
    packed: dict[str, int] = {}  # module: bytes
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part in ("weight", "scales", "biases") and f"{module}.scales" in tensors:
            packed[module] = packed.get(module, 0) + _nbytes(tensor)
    places = {module: place for place, (module, nbytes) in enumerate(packed.items()) if nbytes % 4 == 0}

    def key(name: str) -> tuple[int, int]:
        size, module = tensors[name].dtype.size, name.rpartition(".")[0]
        if size > 4:
            return 0, 0
        return (1, places[module]) if module in places else (2, -size)

    return sorted(tensors, key=key)


def as_float32(value: mx.array) -> mx.array:
    """Floating-point values in float32, others as they are."""
    return value.astype(mx.float32) if mx.issubdtype(value.dtype, mx.floating) else value


class _Reader:
    """Hands out lazy arrays of one file, each once: an array that was evaluated keeps its values as long as
    someone has it, so a second reading is by a fresh array."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fresh: dict[str, mx.array] = {}

    def of(self, name: str) -> Callable[[], mx.array]:
        return lambda: self.read(name)

    def read(self, name: str) -> mx.array:
        if name not in self.fresh:
            try:
                self.fresh = mx.load(str(self.path), format="safetensors")
            except (RuntimeError, ValueError) as error:
                raise CheckpointError(f"{self.path} can't be read: {error}") from None
        try:
            return self.fresh.pop(name)
        except KeyError:
            raise CheckpointError(f"{self.path} has changed: tensor {name} is gone") from None


def _entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """dtype, shape and the first and last offset of one entry of a header, each checked."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(f"{path}: tensor {name} needs dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name} is of type {dtype}, which MLX doesn't read",
            "a checkpoint in bfloat16, float16 or float32",
        )
    if (
        not isinstance(shape, list)
        or len(shape) > _MAX_DIMENSIONS
        or not all(type(n) is int and 0 <= n < 2**31 for n in shape)
    ):
        raise CheckpointError(f"{path}: tensor {name} has no possible shape: {short_repr(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets):
        raise CheckpointError(f"{path}: tensor {name} has no two offsets: {offsets}")
    first, last = offsets
    needed = math.prod(shape) * DTYPES[dtype].size
    if not 0 <= first <= last or last - first != needed:
        raise CheckpointError(f"{path}: tensor {name} claims {last - first} bytes, its shape needs {needed}")
    return dtype, tuple(shape), first, last


def _nbytes(tensor: LazyTensor) -> int:
    return math.prod(tensor.shape) * tensor.dtype.size


def _bytes_of(tensor: LazyTensor, name: str, path: Path, finite: bool) -> memoryview:
    value = tensor.read()
    if tuple(value.shape) != tuple(tensor.shape) or value.dtype != tensor.dtype:
        raise CheckpointError(f"{path}: tensor {name} was read as {value.dtype} {list(value.shape)}")
    if value.size == 0:
        return memoryview(b"")
    try:
        raw = np.array(mx.contiguous(value).view(_BITS[value.dtype.size]), copy=False)
    except RuntimeError as error:
        raise CheckpointError(f"{path}: tensor {name} can't be read: {error}") from None
    if finite and mx.issubdtype(value.dtype, mx.floating) and not max_abs(value) < math.inf:
        raise CheckpointError(f"{path}: tensor {name} has values that are not finite")
    return memoryview(raw).cast("B")
