"""Read PyTorch's files (`pytorch_model.bin`, `.pt`, `.pth`) without PyTorch and without running code from them.

Since PyTorch 1.6 a file is a ZIP archive: `NAME/data.pkl` describes the tensors, and each record `NAME/data/KEY`
contains one storage, uncompressed
(https://docs.pytorch.org/docs/stable/notes/serialization.html).
"""

from __future__ import annotations

import math
import struct
import zipfile
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
_ZIP, _LEGACY = b"PK\x03\x04", b"\x80\x02\x8a\x0a"  # PyTorch < 1.6 writes pickles, the first of a large number
_NOT_MODELS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")
_NESTED = ("state_dict", "model_state_dict", "model", "module")  # keys of the weights in files of training scripts
_MAX_DIRECTORY = 4_000_000  # bytes of a ZIP file's directory, about 100 for each storage
_MAX_PICKLE = 4_000_000

# Storage -> NumPy's type, the dtype of the array, and safetensors' name. MLX has float64 on a CPU only.
_STORAGE_TYPES = {
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
    """Whether a file that starts with these 4 bytes is one of PyTorch's."""
    return start[:4] in (_ZIP, _LEGACY)


def has_weights(folder: Path) -> bool:
    """Whether a folder has a model in PyTorch's format."""
    return (folder / _INDEX).exists() or bool(_files(folder))


def folder_tensors(folder: Path) -> dict[str, LazyTensor]:
    """Describe all tensors of a folder.

    They are those of `pytorch_model.bin.index.json` if there is one, else of `pytorch_model*.bin`, else of the only
    `.bin`, `.pt` or `.pth` file.

    Raises:
        CheckpointError: Names the file and the tensor.
    """
    if (folder / _INDEX).exists():
        return indexed_tensors(folder / _INDEX, file_tensors)
    return joined_tensors(_files(folder), file_tensors)


def file_tensors(path: Path) -> dict[str, LazyTensor]:
    """Describe the tensors of one file, and check that it has all their bytes.

    The dictionary of tensors may be nested under one of `_NESTED`.

    Raises:
        CheckpointError: Names the file and the tensor, or an operation of the pickle that no tensor needs.
    """
    with open_regular(path, CheckpointError) as file:
        start = file.read(4)
        if start == _LEGACY:
            raise CheckpointError(
                f"{path} has the format of PyTorch before 1.6", "torch.load and torch.save with a newer PyTorch"
            )
        if start != _ZIP:
            raise CheckpointError(f"{path} is not a PyTorch file: it is not a ZIP archive", "copy or download it again")
        archive = _Archive(path, file)
        content = archive.read_pickle()
        try:
            state = _state(read_pickle(content))
        except PickleError as error:
            hint = "the model in safetensors, or torch.save(model.state_dict(), ...)"
            raise CheckpointError(f"{path}: unsupported pickle: {error}", hint) from None
        return {name: _tensor(archive, name, view) for name, view in state.items()}


class _BoundedFile:
    """A file for `zipfile` that doesn't read a directory that is too large for memory."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.seek, self.tell = file, file.seek, file.tell

    def seekable(self) -> bool:
        return True

    def read(self, count: int = -1) -> bytes:
        if count > _MAX_DIRECTORY:
            raise zipfile.BadZipFile(f"its directory has {count} bytes, more than any model's")
        return self.file.read(_MAX_DIRECTORY if count < 0 else count)


class _Archive:
    """The records of an open file by name. Raises CheckpointError for anything that PyTorch doesn't write."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        try:
            with zipfile.ZipFile(_BoundedFile(file)) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, EOFError, OSError) as error:
            hint = "copy or download it again"
            raise CheckpointError(f"{path} is not a complete PyTorch file: {error}", hint) from None
        compressed = [entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1]
        if compressed:
            raise CheckpointError(f"{path}: record {compressed[0].filename} is compressed, PyTorch doesn't compress")
        self.headers = {entry.filename: entry.header_offset for entry in entries}
        self.sizes = {entry.filename: entry.file_size for entry in entries}
        pickles = [name for name in self.sizes if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise CheckpointError(f"{path} is not a PyTorch file: it has no data.pkl")
        self.root = pickles[0].removesuffix("data.pkl")  # "archive/"
        self._starts: dict[str, int] = {}

    def read_pickle(self) -> bytes:
        byte_order = f"{self.root}byteorder"
        if self.sizes.get(byte_order, 17) <= 16 and self._read(byte_order) == b"big":
            raise CheckpointError(f"{self.path} has big-endian numbers", "a file saved on a little-endian machine")
        name = f"{self.root}data.pkl"
        if self.sizes[name] > _MAX_PICKLE:
            raise CheckpointError(f"{self.path}: {name} has {self.sizes[name]} bytes, more than any model's")
        return self._read(name)

    def _read(self, name: str) -> bytes:
        self.file.seek(self.start(name))
        return self.file.read(self.sizes[name])

    def start(self, name: str) -> int:
        """Offset of a record's data, after its local header, which PyTorch pads. Checks that all of it is there."""
        if name not in self._starts:  # several tensors may share a record
            self.file.seek(self.headers[name])
            header = self.file.read(30)
            if len(header) < 30 or header[:4] != _ZIP:
                raise CheckpointError(f"{self.path}: record {name} has no header", "copy or download it again")
            start = self.headers[name] + 30 + sum(struct.unpack_from("<HH", header, 26))
            if start + self.sizes[name] > self.path.stat().st_size:
                raise CheckpointError(
                    f"{self.path} is truncated: record {name} is cut off", "copy or download it again"
                )
            self._starts[name] = start
        return self._starts[name]


def _state(content: Any) -> dict[str, TensorView]:
    """The dictionary of tensors, without other values in it."""
    for key in _NESTED:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    state = content if isinstance(content, dict) else {}
    state = {name: value for name, value in state.items() if isinstance(name, str) and isinstance(value, TensorView)}
    if not state:
        raise PickleError("it has no dictionary of tensors")
    return state


def _tensor(archive: _Archive, name: str, view: TensorView) -> LazyTensor:
    """Describe a tensor, after checking that its view is within its storage, and the storage within the file."""
    path, (source, dtype, stored) = archive.path, _STORAGE_TYPES[view.storage.kind]
    itemsize = np.dtype(source).itemsize
    record = f"{archive.root}data/{view.storage.key}"
    if record not in archive.sizes:
        raise CheckpointError(f"{path}: tensor {name} is in record {record}, which is missing")
    shape, strides, offset = view.shape, view.strides, view.offset
    if not _are_counts(shape) or not _are_counts(strides) or len(shape) != len(strides) or not _are_counts((offset,)):
        raise CheckpointError(f"{path}: tensor {name} has impossible shape and strides")
    size = math.prod(shape)
    extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if size else 0
    available = min(view.storage.numel, archive.sizes[record] // itemsize)
    if available < view.storage.numel or offset + extent > available:
        raise CheckpointError(f"{path}: tensor {name} exceeds its storage, {available} elements in {record}")
    if size > extent:
        raise CheckpointError(f"{path}: tensor {name} has elements that share memory", "saving its .contiguous()")
    begin = archive.start(record) + offset * itemsize

    def read() -> mx.array:
        with os_errors_as(CheckpointError, "read", path):
            flat: np.ndarray = np.fromfile(path, source, extent, offset=begin)
        if flat.size != extent:
            raise CheckpointError(f"{path} is truncated: record {record} is cut off")
        values = np.lib.stride_tricks.as_strided(flat, shape, [stride * itemsize for stride in strides])
        if dtype == mx.bfloat16:  # NumPy lacks it
            return mx.array(values).view(mx.bfloat16)
        return mx.array(values.astype(np.float32) if stored == "F64" else values)

    return LazyTensor(shape, dtype, stored, size * itemsize, read)


def _are_counts(values: Any) -> bool:
    """Whether these are valid sizes or strides of an array."""
    return isinstance(values, tuple) and len(values) <= 8 and all(type(n) is int and 0 <= n < 2**31 for n in values)


def _files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("pytorch_model*.bin"))
    if files:
        return files
    files = [file for suffix in ("bin", "pt", "pth") for file in folder.glob(f"*.{suffix}")]
    files = [file for file in files if not file.name.startswith(_NOT_MODELS)]
    return files if len(files) == 1 else []
