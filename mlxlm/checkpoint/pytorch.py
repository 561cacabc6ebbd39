"""PyTorch's files (`pytorch_model.bin`, `.pt`, `.pth`), read without PyTorch and without running what is in them.

Since PyTorch 1.6 a file is a ZIP archive: `NAME/data.pkl` describes the tensors, and each record `NAME/data/KEY`
has the numbers of one storage, uncompressed
(https://docs.pytorch.org/docs/stable/notes/serialization.html).
"""

from __future__ import annotations

import math
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.lazy_tensor import LazyTensor
from mlxlm.checkpoint.sharded import indexed_tensors, joined_tensors
from mlxlm.checkpoint.unpickler import PickleError, TensorView, read_pickle
from mlxlm.utils.bounded_reads import open_regular
from mlxlm.utils.errors import CheckpointError, os_errors_as

_INDEX = "pytorch_model.bin.index.json"
_ZIP, _LEGACY = b"PK\x03\x04", b"\x80\x02\x8a\x0a"  # PyTorch < 1.6 writes pickles, the first of them a long number
_NOT_MODELS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")
_NESTED = ("state_dict", "model_state_dict", "model", "module")  # where training scripts put the weights
_MAX_DIRECTORY = 4_000_000  # bytes of a ZIP file's list of records, about 100 for each storage
_MAX_PICKLE = 4_000_000

# Storage -> numpy's type of it, what it is read as, and safetensors' word. MLX has float64 on a CPU only.
_TYPES = {
    "FloatStorage": (np.float32, mx.float32, "F32"),
    "HalfStorage": (np.float16, mx.float16, "F16"),
    "BFloat16Storage": (np.uint16, mx.bfloat16, "BF16"),
    "DoubleStorage": (np.float64, mx.float32, "F64"),
    "LongStorage": (np.int64, mx.int64, "I64"),
    "IntStorage": (np.int32, mx.int32, "I32"),
    "ShortStorage": (np.int16, mx.int16, "I16"),
    "CharStorage": (np.int8, mx.int8, "I8"),
    "ByteStorage": (np.uint8, mx.uint8, "U8"),
    "BoolStorage": (np.bool_, mx.bool_, "BOOL"),
}


def is_pytorch_file(start: bytes) -> bool:
    """Whether a file that begins with these 4 bytes is one of PyTorch's."""
    return start[:4] in (_ZIP, _LEGACY)


def has_weights(folder: Path) -> bool:
    """Whether a folder has a model in PyTorch's files."""
    return (folder / _INDEX).exists() or bool(_files(folder))


def folder_tensors(folder: Path) -> dict[str, LazyTensor]:
    """All tensors of a folder: by `pytorch_model.bin.index.json`, else of `pytorch_model*.bin`, else of the only
    `.bin`, `.pt` or `.pth` file. Raises CheckpointError naming the file and the tensor."""
    if (folder / _INDEX).exists():
        return indexed_tensors(folder / _INDEX, file_tensors)
    return joined_tensors(_files(folder), file_tensors)


def file_tensors(path: Path) -> dict[str, LazyTensor]:
    """The tensors of one file, described; every byte they claim is there.

    The tensors may lie under one of `_NESTED`. Raises CheckpointError naming the file and the tensor, or
    what the pickle in it asks for that no tensor needs.
    """
    with open_regular(path, CheckpointError) as file:
        start = file.read(4)
        if start == _LEGACY:
            raise CheckpointError(
                f"{path} has the format of PyTorch before 1.6", "torch.load and torch.save it with a newer PyTorch"
            )
        if start != _ZIP:
            raise CheckpointError(f"{path} is not a PyTorch file: it is no ZIP archive", "copy or download it again")
        records = _records(path, file)
        content = _pickle(path, file, records)
        try:
            state = _state(read_pickle(content))
        except PickleError as error:
            hint = "the model in safetensors, or a file by torch.save(model.state_dict(), ...)"
            raise CheckpointError(f"{path}: its pickle is refused: {error}", hint) from None
        starts: dict[str, int] = {}  # by record: several tensors may share one
        return {name: _tensor(path, file, records, starts, name, view) for name, view in state.items()}


@dataclass(frozen=True)
class _Records:
    root: str  # "archive/"
    spans: Mapping[str, tuple[int, int]]  # name -> where its local header begins, bytes of its data


class _Bounded:
    """A file for `zipfile` that refuses to read a list of records that is too long for memory."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.seek, self.tell = file, file.seek, file.tell

    def seekable(self) -> bool:
        return True

    def read(self, count: int = -1) -> bytes:
        if count > _MAX_DIRECTORY:
            raise zipfile.BadZipFile(f"its directory of {count} bytes is longer than any model's")
        return self.file.read(_MAX_DIRECTORY if count < 0 else count)


def _records(path: Path, file: BinaryIO) -> _Records:
    try:
        with zipfile.ZipFile(_Bounded(file)) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, EOFError, OSError) as error:
        raise CheckpointError(f"{path} is not a whole PyTorch file: {error}", "copy or download it again") from None
    odd = [entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1]
    if odd:
        raise CheckpointError(f"{path}: record {odd[0].filename} is compressed, as PyTorch never does")
    spans = {entry.filename: (entry.header_offset, entry.file_size) for entry in entries}
    roots = [name.removesuffix("data.pkl") for name in spans if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(roots) != 1:
        raise CheckpointError(f"{path} is not a PyTorch file: it has no data.pkl")
    return _Records(roots[0], spans)


def _pickle(path: Path, file: BinaryIO, records: _Records) -> bytes:
    order = records.spans.get(f"{records.root}byteorder")
    if order and order[1] <= 16 and _record(path, file, records, f"{records.root}byteorder") == b"big":
        raise CheckpointError(f"{path} has big-endian numbers", "a file saved on a little-endian machine")
    name = f"{records.root}data.pkl"
    if records.spans[name][1] > _MAX_PICKLE:
        raise CheckpointError(f"{path}: {name} has {records.spans[name][1]} bytes, more than any model's")
    return _record(path, file, records, name)


def _record(path: Path, file: BinaryIO, records: _Records, name: str) -> bytes:
    file.seek(_start(path, file, records, name))
    return file.read(records.spans[name][1])


def _start(path: Path, file: BinaryIO, records: _Records, name: str) -> int:
    """Where the data of a record begin, after its local header, which PyTorch pads; all of it is in the file."""
    offset, size = records.spans[name]
    file.seek(offset)
    header = file.read(30)
    if len(header) < 30 or header[:4] != _ZIP:
        raise CheckpointError(f"{path}: record {name} has no header", "copy or download it again")
    start = offset + 30 + sum(struct.unpack_from("<HH", header, 26))
    if start + size > path.stat().st_size:
        raise CheckpointError(f"{path} is truncated: record {name} is cut off", "copy or download it again")
    return start


def _state(content: Any) -> dict[str, TensorView]:
    """The dictionary of tensors; numbers and texts beside them are left out."""
    for key in _NESTED:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    state = content if isinstance(content, dict) else {}
    state = {name: value for name, value in state.items() if isinstance(name, str) and isinstance(value, TensorView)}
    if not state:
        raise PickleError("it has no tensors by name")
    return state


def _tensor(
    path: Path, file: BinaryIO, records: _Records, starts: dict[str, int], name: str, view: TensorView
) -> LazyTensor:
    """A tensor of the file after checking that its view lies within its storage, and that within the file."""
    source, dtype, stored = _TYPES[view.storage.kind]
    itemsize = np.dtype(source).itemsize
    record = f"{records.root}data/{view.storage.key}"
    if record not in records.spans:
        raise CheckpointError(f"{path}: tensor {name} is in record {record}, which is missing")
    if record not in starts:
        starts[record] = _start(path, file, records, record)
    shape, strides, offset = view.shape, view.strides, view.offset
    if not _are_counts(shape) or not _are_counts(strides) or len(shape) != len(strides) or not _are_counts((offset,)):
        raise CheckpointError(f"{path}: tensor {name} has no possible shape and strides")
    size = math.prod(shape)
    extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if size else 0
    held = min(view.storage.numel, records.spans[record][1] // itemsize)
    if held < view.storage.numel or offset + extent > held:
        raise CheckpointError(f"{path}: tensor {name} goes beyond its storage, {held} elements in {record}")
    if size > extent:
        raise CheckpointError(f"{path}: tensor {name} has elements that share their memory", "its .contiguous()")
    begin = starts[record] + offset * itemsize

    def read() -> mx.array:
        with os_errors_as(CheckpointError, "read", path):
            flat = np.fromfile(path, source, extent, offset=begin)
        if flat.size != extent:
            raise CheckpointError(f"{path} is truncated: record {record} is cut off")
        values = np.lib.stride_tricks.as_strided(flat, shape, [stride * itemsize for stride in strides])
        if dtype == mx.bfloat16:  # numpy has none; the bits are the same
            return mx.array(values).view(mx.bfloat16)
        return mx.array(values.astype(np.float32) if stored == "F64" else values)

    return LazyTensor(shape, dtype, stored, size * itemsize, read)


def _are_counts(values: Any) -> bool:
    """Whether these can be the sizes or strides of an array."""
    return isinstance(values, tuple) and len(values) <= 8 and all(type(n) is int and 0 <= n < 2**31 for n in values)


def _files(folder: Path) -> list[Path]:
    named = sorted(folder.glob("pytorch_model*.bin"))
    if named:
        return named
    found = [file for kind in ("bin", "pt", "pth") for file in folder.glob(f"*.{kind}")]
    models = [file for file in found if not file.name.startswith(_NOT_MODELS)]
    return models if len(models) == 1 else []
