"""Read PyTorch's files (`pytorch_model.bin`, `.pt`, `.pth`) without PyTorch and without running code from them.

Since PyTorch 1.6 a file is a ZIP archive: `NAME/data.pkl` describes the tensors, and each record `NAME/data/KEY`
contains one storage, uncompressed (https://docs.pytorch.org/docs/stable/notes/serialization.html). Before, it was a
series of pickles: a magic number, the version, facts about the machine, the description of the tensors, and the keys
of the storages. Then follows each storage in this order, as its number of elements, int64, and the elements.

Python's unpickler calls whatever a pickle names. The one below only has the operations that `torch.save` writes for a
dictionary of tensors (pickle protocols 2 to 5, https://docs.python.org/3/library/pickletools.html), and knows a few
names, none of which it imports. It is a subclass of the unpickler in Python, which unlike the one in C doesn't
allocate memory for the largest index of its memo.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mlxlm.backend.mlx import mx
from mlxlm.checkpoint.lazy_tensor import LazyTensor, read_array
from mlxlm.checkpoint.locations import PYTORCH_INDEX, pytorch_files
from mlxlm.checkpoint.sharded import sharded_tensors
from mlxlm.utils.bounded_reads import open_regular
from mlxlm.utils.errors import CheckpointError

_ZIP, _LEGACY = b"PK\x03\x04", b"\x80\x02\x8a\x0a"  # PyTorch < 1.6 begins with the pickle of a large number
_LEGACY_MAGIC, _LEGACY_VERSION = 0x1950A86A20F9469CFC6C, 1001
_NESTED = ("state_dict", "model_state_dict", "model", "module")  # keys of the weights in files of training scripts
_MAX_PICKLE = 4_000_000
_AGAIN = "copy or download it again"

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
# A tensor needs about 70 reads, and no file in use has 10,000 tensors.
_MAX_READS = 700_000
_MAX_INT_KEY = 2**31  # optimizers number their parameters
_OPERATIONS = """PROTO MARK STOP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT BINUNICODE SHORT_BINUNICODE
    EMPTY_LIST EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 APPEND APPENDS SETITEM SETITEMS BINPUT LONG_BINPUT MEMOIZE BINGET
    LONG_BINGET GLOBAL STACK_GLOBAL BINPERSID REDUCE"""
_DTYPES = "float32 float16 bfloat16 float64 int64 int32 int16 int8 uint8 bool"


def is_pytorch_file(start: bytes) -> bool:
    """Whether a file that starts with these 4 bytes is one of PyTorch's."""
    return start[:4] in (_ZIP, _LEGACY)


def folder_tensors(folder: Path) -> dict[str, LazyTensor]:
    """Describe all tensors of a folder.

    They are those of `pytorch_model.bin.index.json` if there is one, else of `pytorch_model*.bin`, else of the only
    `.bin`, `.pt` or `.pth` file.

    Raises:
        CheckpointError: Names the file and the tensor.
    """
    return sharded_tensors(folder / PYTORCH_INDEX, pytorch_files(folder), file_tensors)


def file_tensors(path: Path) -> dict[str, LazyTensor]:
    """Describe the tensors of one file, and check that it has all their bytes.

    The dictionary of tensors may be nested under one of `_NESTED`.

    Raises:
        CheckpointError: Names the file and the tensor, or an operation of the pickle that no tensor needs.
    """
    with open_regular(path, CheckpointError) as file:
        start = file.read(4)
        if not is_pytorch_file(start):
            raise CheckpointError(f"{path} is not a PyTorch file: it is not a ZIP archive", _AGAIN)
        try:
            content, storages = (_open_zip if start == _ZIP else _open_legacy)(path, file)
            state = _state(content)
        except PickleError as error:
            hint = "the model in safetensors, or torch.save(model.state_dict(), ...)"
            raise CheckpointError(f"{path}: unsupported pickle: {error}", hint) from None
        return {name: _tensor(path, storages, name, view) for name, view in state.items()}


@dataclass(frozen=True)
class _Bytes:
    """Where a storage is: its offset in the file, its size, and its name for errors."""

    begin: int
    size: int
    name: str


def _open_zip(path: Path, file: BinaryIO) -> tuple[Any, Callable[[str], _Bytes | None]]:
    """The content of `data.pkl`, and a function that finds a storage by its key."""
    archive = _Archive(path, file)
    byte_order = f"{archive.root}byteorder"
    if byte_order in archive.sizes and archive.read(byte_order) == b"big":
        raise _big_endian(path)

    def find(key: str) -> _Bytes | None:
        record = f"{archive.root}data/{key}"
        if record not in archive.sizes:
            return None
        return _Bytes(archive.start(record), archive.sizes[record], record)

    return read_pickle(archive.read(f"{archive.root}data.pkl")), find


def _open_legacy(path: Path, file: BinaryIO) -> tuple[Any, Callable[[str], _Bytes | None]]:
    """The same of a file of PyTorch before 1.6."""
    file.seek(0)
    reader = _Reader(file.read(_MAX_PICKLE))
    storages: dict[str, Storage] = {}
    magic, version, machine = (_load(reader, storages) for _ in range(3))
    if (magic, version) != (_LEGACY_MAGIC, _LEGACY_VERSION):
        raise PickleError(f"it is not of version {_LEGACY_VERSION} of the format before PyTorch 1.6")
    if not isinstance(machine, dict) or machine.get("little_endian") is not True:
        raise _big_endian(path)
    content, keys = _load(reader, storages), _load(reader, storages)
    found: dict[str, _Bytes] = {}
    end, size = reader.tell(), path.stat().st_size
    for key in keys if isinstance(keys, list) else ():
        storage = storages.get(key) if isinstance(key, str) else None
        if storage is None or key in found:
            raise PickleError("its list of storages isn't that of its tensors")
        file.seek(end)
        count, begin = int.from_bytes(file.read(8), "little"), end + 8
        end = begin + storage.numel * np.dtype(_STORAGE_TYPES[storage.kind][0]).itemsize
        if end > size:
            raise CheckpointError(f"{path} is truncated: storage {key} is cut off", _AGAIN)
        if count != storage.numel:
            raise CheckpointError(f"{path}: storage {key} has {count} elements, its tensors say {storage.numel}")
        found[key] = _Bytes(begin, end - begin, f"storage {key}")
    return content, found.get


def _big_endian(path: Path) -> CheckpointError:
    return CheckpointError(f"{path} has big-endian numbers", "a file saved on a little-endian machine")


class _Archive:
    """The records of an open file by name. Raises CheckpointError for anything that PyTorch doesn't write."""

    def __init__(self, path: Path, file: BinaryIO) -> None:
        self.path, self.file = path, file
        try:
            with zipfile.ZipFile(file) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, NotImplementedError, ValueError, struct.error, EOFError, OSError) as error:
            raise CheckpointError(f"{path} is not a complete PyTorch file: {error}", _AGAIN) from None
        compressed = [entry for entry in entries if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1]
        if compressed:
            raise CheckpointError(f"{path}: record {compressed[0].filename} is compressed, PyTorch doesn't compress")
        self.headers = {entry.filename: entry.header_offset for entry in entries}
        self.sizes = {entry.filename: entry.file_size for entry in entries}
        pickles = [name for name in self.sizes if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise CheckpointError(f"{path} is not a PyTorch file: it has no data.pkl")
        self.root = pickles[0].removesuffix("data.pkl")  # "archive/"

    def read(self, name: str) -> bytes:
        if self.sizes[name] > _MAX_PICKLE:
            raise CheckpointError(f"{self.path}: {name} has {self.sizes[name]} bytes, more than any model's")
        self.file.seek(self.start(name))
        return self.file.read(self.sizes[name])

    def start(self, name: str) -> int:
        """Offset of a record's data, after its local header, which PyTorch pads. Checks that all of it is there."""
        self.file.seek(self.headers[name])
        header = self.file.read(30)
        complete = len(header) == 30 and header[:4] == _ZIP
        start = self.headers[name] + 30 + sum(struct.unpack_from("<HH", header, 26)) if complete else math.inf
        if start + self.sizes[name] > self.path.stat().st_size:
            raise CheckpointError(f"{self.path} is truncated: record {name} is cut off", _AGAIN)
        return int(start)


def _state(content: Any) -> dict[str, TensorView]:
    """The dictionary of tensors, without other values in it."""
    content = content if isinstance(content, dict) else {}
    content = next((content[key] for key in _NESTED if isinstance(content.get(key), dict)), content)
    state = {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, TensorView)}
    if not state:
        raise PickleError("it has no dictionary of tensors")
    return state


def _tensor(path: Path, find: Callable[[str], _Bytes | None], name: str, view: TensorView) -> LazyTensor:
    """Describe a tensor, after checking that its view is within its storage, and the storage within the file."""
    source, dtype, stored = _STORAGE_TYPES[view.storage.kind]
    itemsize = np.dtype(source).itemsize
    if (data := find(view.storage.key)) is None:
        raise CheckpointError(f"{path}: tensor {name} is in storage {view.storage.key}, which is missing", _AGAIN)
    shape, strides, offset = view.shape, view.strides, view.offset
    if not all(map(_are_counts, (shape, strides, (offset,)))) or len(shape) != len(strides):
        raise CheckpointError(f"{path}: tensor {name} has impossible shape and strides")
    size = math.prod(shape)
    extent = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if size else 0
    available = min(view.storage.numel, data.size // itemsize)
    if available < view.storage.numel or offset + extent > available:
        raise CheckpointError(f"{path}: tensor {name} exceeds its storage, {available} elements in {data.name}")
    if size > extent:
        raise CheckpointError(f"{path}: tensor {name} has elements that share memory", "saving its .contiguous()")
    begin = data.begin + offset * itemsize

    def read() -> mx.array:
        flat = read_array(path, source, extent, begin)
        values = np.lib.stride_tricks.as_strided(flat, shape, [stride * itemsize for stride in strides])
        if dtype == mx.bfloat16:  # NumPy lacks it
            return mx.array(values).view(mx.bfloat16)
        return mx.array(values.astype(np.float32) if stored == "F64" else values)

    return LazyTensor(shape, dtype, stored, size * itemsize, read)


def _are_counts(values: Any) -> bool:
    """Whether these are valid sizes or strides of an array."""
    return isinstance(values, tuple) and len(values) <= 8 and all(type(n) is int and 0 <= n < 2**31 for n in values)


class PickleError(Exception):
    """A pickle that is not a dictionary of tensors."""


@dataclass(frozen=True)
class Storage:
    """A PyTorch storage, in the record `key`."""

    kind: str  # "BFloat16Storage"
    key: str
    numel: int


@dataclass(frozen=True)
class TensorView:
    """A tensor: a view of a storage. Shape and strides count elements and are not checked yet."""

    storage: Storage
    offset: Any
    shape: Any
    strides: Any


def read_pickle(raw: bytes) -> Any:
    """Return dictionaries, lists, tuples, numbers and strings, with a `TensorView` for each tensor.

    Raises:
        PickleError: The pickle is malformed or has other contents.
    """
    return _load(_Reader(raw), {})


def _load(reader: _Reader, storages: dict[str, Storage]) -> Any:
    """Read the next pickle, and add the storages that it names to `storages`."""
    try:
        return _Unpickler(reader, storages).load()
    except PickleError:
        raise
    except EOFError:
        raise PickleError("it is cut off") from None
    except Exception as error:
        raise PickleError(f"it is malformed ({type(error).__name__})") from None


class _Reader(io.BytesIO):
    """The pickle, with a limit on the number of operations."""

    reads = 0

    def read(self, size: int | None = -1, /) -> bytes:
        self.reads += 1
        if self.reads > _MAX_READS:
            raise PickleError(f"it needs more than {_MAX_READS} reads, more than any model")
        part = super().read(size)
        if len(part) != size:
            raise EOFError
        return part


class _Dict(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        # Hashing nested tuples can take forever, and many large integers share a hash.
        if type(key) is not str and not (type(key) is int and 0 <= key < _MAX_INT_KEY):
            raise TypeError
        super().__setitem__(key, value)


class _Operations(dict[int, Callable[[Any], None]]):
    def __missing__(self, code: int) -> Any:
        raise PickleError(f"it has operation {bytes([code])!r}, which no state_dict needs")


def _rebuild_tensor(storage: Storage, offset: Any, shape: Any, strides: Any, *others: Any) -> TensorView:
    if type(storage) is not Storage:
        raise TypeError
    flags = others[2] if len(others) > 2 else None
    if isinstance(flags, dict) and any(flags.values()):  # "conj" and "neg": lazily conjugated or negated
        raise PickleError(f"a tensor has {', '.join(map(str, flags))} set (resolve_neg, resolve_conj)")
    return TensorView(storage, offset, shape, strides)


def _ordered_dict() -> _Dict:  # without arguments
    return _Dict()


# What REDUCE can call. Each returns one of its arguments or a new, small object.
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _rebuild_tensor,  # before PyTorch 0.4
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_parameter": lambda data, *others: data,
    "torch.Size": lambda sizes: sizes,
    "collections.OrderedDict": _ordered_dict,
}


class _Unpickler(pickle._Unpickler):
    dispatch = _Operations(
        {getattr(pickle, name)[0]: pickle._Unpickler.dispatch[getattr(pickle, name)[0]] for name in _OPERATIONS.split()}
        | {
            pickle.FRAME[0]: lambda unpickler: unpickler.read(8),
            pickle.EMPTY_DICT[0]: lambda unpickler: unpickler.append(_Dict()),
            pickle.BUILD[0]: lambda unpickler: unpickler.stack.pop(),  # attributes, as a state_dict's `_metadata`
        }
    )

    def __init__(self, reader: _Reader, storages: dict[str, Storage]):
        super().__init__(reader)
        self._storages = storages

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in (*_STORAGE_TYPES, *_DTYPES.split()):
            return name
        if (function := _FUNCTIONS.get(f"{module}.{name}")) is None:
            raise PickleError(f"it refers to {module}.{name}, and code in a file is never run")
        return function

    def persistent_load(self, pid: Any) -> Storage:
        kind, storage, key, _device, numel, *views = pid
        if kind != "storage" or storage not in _STORAGE_TYPES or type(key) is not str or type(numel) is not int:
            raise TypeError
        if numel < 0 or views not in ([], [None]):  # views of storages, before PyTorch 0.4
            raise TypeError
        return self._storages.setdefault(key, Storage(storage, key, numel))
