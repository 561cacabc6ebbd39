"""Read the header of a GGUF file: metadata and the table of tensors, every number checked before it is used.

Format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian: magic, version, tensor count,
metadata count; metadata as key, type, value; for each tensor name, dimensions (fastest first), tensor type and offset;
then the data, each tensor at a multiple of `general.alignment`. Versions 2 and 3 differ in byte order only.
The gguf package's reader has no bounds; this one is for untrusted files.
"""

from __future__ import annotations

import functools
import math
import mmap
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mlxlm.utils.errors import CheckpointError, MlxlmError, os_errors_as

# Tensor types of ggml that `gguf.quants` dequantizes.
_READABLE = (
    "F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, "
    "IQ3_S, IQ1_S, IQ1_M, IQ4_NL, IQ4_XS, TQ1_0, TQ2_0, MXFP4"
)
# Far above those of models: the largest vocabularies (260,000 tokens, 515,000 merges) make headers of 20 MB.
_MAX_HEADER = 64 << 20  # bytes
_MAX_ENTRIES = 1 << 15  # tensors, and values of the metadata
_MAX_STRINGS = 1 << 21  # in all arrays together; skipping them takes half a second
_MAX_STRING = 16 << 20  # bytes of one value, e.g. a chat template
_MAX_NAME = 1024  # bytes; llama.cpp reads names of at most 63
_MAX_DEPTH = 4  # of nested arrays
_MAX_ALIGNMENT = 1 << 20
_AGAIN = "copy or download the file again"
_STRING, _ARRAY, _BOOL = 8, 9, 7
_CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", _BOOL: "B", 10: "Q", 11: "q", 12: "d"}
_NUMBERS = {kind: struct.Struct(f"<{code}") for kind, code in _CODES.items()}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True)
class GGMLType:
    """A tensor type: `block_size` weights of a row are stored together in `type_size` bytes."""

    name: str
    block_size: int
    type_size: int

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor; `block_size` divides its rows."""
        return math.prod(shape) // self.block_size * self.type_size


@functools.cache
def ggml_types() -> Mapping[int, GGMLType]:
    """All readable tensor types by their number in GGUF files."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType  # half a second

    kinds = (GGMLQuantizationType[name] for name in _READABLE.split(", "))
    return {kind.value: GGMLType(kind.name, *GGML_QUANT_SIZES[kind]) for kind in kinds}


def ggml_type(name: str) -> GGMLType:
    """The type of a name ("Q8_0")."""
    return next(kind for kind in ggml_types().values() if kind.name == name)


@dataclass(frozen=True)
class Array:
    """An array of the metadata that stays in the file until `read`; `kind` is the number of its element type."""

    path: Path
    kind: int
    count: int
    start: int
    end: int

    @property
    def holds_strings(self) -> bool:
        """Whether its elements are strings."""
        return self.kind == _STRING

    @property
    def holds_numbers(self) -> bool:
        """Whether its elements are numbers."""
        return self.kind in _NUMBERS

    def read(self) -> list[Any]:
        """Return its elements: numbers, strings or lists. Bytes that aren't UTF-8 become U+FFFD."""
        with os_errors_as(CheckpointError, "read", self.path), self.path.open("rb") as file:
            file.seek(self.start)
            content = file.read(self.end - self.start)
        if len(content) != self.end - self.start:
            raise CheckpointError(f"{self.path} has become shorter while it was read")
        cursor = _Cursor(self.path, content, len(content))
        return [cursor.value(self.kind, "an array", load_arrays=True) for _ in range(self.count)]


@dataclass(frozen=True)
class TensorInfo:
    """Location of one tensor. `shape` is in NumPy's order, slowest dimension first."""

    path: Path
    shape: tuple[int, ...]
    type: GGMLType
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """One file, or the parts of a split model together. Metadata values are numbers, strings and `Array`s."""

    path: Path
    metadata: Mapping[str, Any] = field(repr=False)
    tensors: Mapping[str, TensorInfo] = field(repr=False)


def read_header(path: Path) -> Header:
    """Read the header of one file. Raises CheckpointError naming the file and the invalid field."""
    with os_errors_as(CheckpointError, "read", path):
        size = path.stat().st_size
        if size < 24:
            raise CheckpointError(f"{path} is not a whole GGUF file: it has {size} bytes")
        with path.open("rb") as file, mmap.mmap(file.fileno(), min(size, _MAX_HEADER), access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(path, data, size)
            tensor_count, key_count = _preamble(cursor)
            metadata = _metadata(cursor, key_count)
            return Header(path, metadata, _tensors(cursor, tensor_count, metadata.get("general.alignment", 32)))


class _Cursor:
    """A position in the header that never passes its end."""

    def __init__(self, path: Path, data: bytes | mmap.mmap, size: int):
        self.path, self.data, self.size = path, data, size
        self.position = 0
        self.strings = 0

    def check(self, condition: bool, message: str, hint: str | None = None) -> None:
        """Raise CheckpointError unless `condition` holds."""
        if not condition:
            raise CheckpointError(f"{self.path}: {message}", hint)

    def advance(self, count: int, what: str) -> int:
        """Advance by `count` bytes and return their start; `what` names the field in an error."""
        start = self.position
        if count > len(self.data) - start:  # no message is made before: vocabularies have a million strings
            self.check(count <= self.size - start, f"{what} ends past the end of the file", _AGAIN)
            raise CheckpointError(f"{self.path}: the header is larger than {_MAX_HEADER >> 20} MB (at {what})")
        self.position = start + count
        return start

    def u32(self, what: str) -> int:
        return _U32.unpack_from(self.data, self.advance(4, what))[0]

    def u64(self, what: str) -> int:
        return _U64.unpack_from(self.data, self.advance(8, what))[0]

    def text(self, what: str, limit: int = _MAX_STRING) -> str:
        length = self.u64(what)
        if length > limit:
            raise CheckpointError(f"{self.path}: {what} claims {length} bytes, at most {limit} are possible")
        start = self.advance(length, what)
        return self.data[start : start + length].decode("utf-8", "replace")

    def name(self, what: str) -> str:
        name = self.text(what, _MAX_NAME)
        self.check(bool(name) and name.isprintable(), f"{what} is {name!r}, which is not a name")
        return name

    def value(self, kind: int, what: str, depth: int = 0, load_arrays: bool = False) -> Any:
        """Read a number, a string or an array: a list with `load_arrays`, else an `Array` that stays in the file."""
        if kind == _STRING:
            return self.text(what)
        if kind == _ARRAY:
            return self._array(what, depth, load_arrays)
        self.check(kind in _NUMBERS, f"{what} has the unknown type {kind}")
        [value] = _NUMBERS[kind].unpack_from(self.data, self.advance(_NUMBERS[kind].size, what))
        if kind != _BOOL:
            return value
        self.check(value <= 1, f"{what} is {value}, which is neither true (1) nor false (0)")
        return bool(value)

    def _array(self, what: str, depth: int, load_arrays: bool) -> Any:
        kind, count = self.u32(what), self.u64(what)
        self.check(depth < _MAX_DEPTH, f"{what} has more than {_MAX_DEPTH} nested arrays")
        if load_arrays:
            return [self.value(kind, what, depth + 1, load_arrays) for _ in range(count)]
        start = self.position
        if kind in _NUMBERS:
            self.advance(count * _NUMBERS[kind].size, what)
        else:
            self._skip(kind, count, what, depth)
        return Array(self.path, kind, count, start, self.position)

    def _skip(self, kind: int, count: int, what: str, depth: int) -> None:
        self.check(kind in (_STRING, _ARRAY), f"{what} is an array of the unknown type {kind}")
        self.strings += count
        fits = count * 8 <= self.size - self.position and self.strings <= _MAX_STRINGS
        self.check(fits, f"{what} claims {count} elements, more than the file can hold or a model needs")
        if kind == _ARRAY:
            for _ in range(count):
                self._array(what, depth + 1, load_arrays=False)
            return
        at, last, length_at = self.position, len(self.data) - 8, _U64.unpack_from
        for _ in range(count):  # `advance` for each would be three times slower
            if at > last:
                self.advance(at + 8 - self.position, what)  # raises
            at += 8 + length_at(self.data, at)[0]
        self.advance(at - self.position, what)


def _preamble(cursor: _Cursor) -> tuple[int, int]:
    cursor.check(cursor.data[:4] == b"GGUF", "not a GGUF file")
    cursor.position = 4
    version = cursor.u32("the version")
    hint = "gguf-convert-endian of the gguf package"
    cursor.check(version == 0 or version & 0xFFFF > 0, "this GGUF file is big-endian", hint)
    cursor.check(version in (2, 3), f"GGUF version {version} is not supported", "a file of version 2 or 3")
    tensors, keys = cursor.u64("the tensor count"), cursor.u64("the metadata count")
    for count, what in ((tensors, "tensors"), (keys, "metadata values")):
        cursor.check(count <= _MAX_ENTRIES, f"the header claims {count} {what}, at most {_MAX_ENTRIES} are possible")
    return tensors, keys


def _metadata(cursor: _Cursor, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for i in range(count):
        key = cursor.name(f"the key of metadata value {i}")
        cursor.check(key not in metadata, f"{key} occurs twice")
        metadata[key] = cursor.value(cursor.u32(key), key)
    return metadata


def _tensors(cursor: _Cursor, count: int, alignment: Any) -> dict[str, TensorInfo]:
    valid = type(alignment) is int and 8 <= alignment <= _MAX_ALIGNMENT and not alignment & (alignment - 1)
    shown = alignment if isinstance(alignment, int | float) else "not a number"
    cursor.check(valid, f"general.alignment is {shown}, it must be a power of 2 from 8 to {_MAX_ALIGNMENT}")
    relative: dict[str, tuple[tuple[int, ...], GGMLType, int]] = {}
    for i in range(count):
        name = cursor.name(f"the name of tensor {i}")
        cursor.check(name not in relative, f"tensor {name} occurs twice")
        relative[name] = _tensor(cursor, name)
    start = -(-cursor.position // alignment) * alignment
    result = {}
    for name, (shape, kind, offset) in relative.items():
        nbytes = kind.nbytes(shape)
        beyond = start + offset + nbytes - cursor.size
        aligned = offset % alignment == 0
        cursor.check(aligned, f"tensor {name} begins at {offset}, which is not a multiple of {alignment}")
        cursor.check(beyond <= 0, f"tensor {name} ends {beyond} bytes past the end", _AGAIN)
        result[name] = TensorInfo(cursor.path, shape, kind, start + offset, nbytes)
    in_order = sorted(result.items(), key=lambda item: item[1].offset)
    for (before, first), (name, second) in zip(in_order, in_order[1:], strict=False):
        cursor.check(first.offset + first.nbytes <= second.offset, f"tensors {before} and {name} overlap")
    return result


def _tensor(cursor: _Cursor, name: str) -> tuple[tuple[int, ...], GGMLType, int]:
    what = f"tensor {name}"
    rank = cursor.u32(what)
    cursor.check(1 <= rank <= 4, f"{what} has {rank} dimensions, 1 to 4 are possible")
    shape = tuple(cursor.u64(what) for _ in range(rank))[::-1]
    number = cursor.u32(what)
    cursor.check(number in ggml_types(), f"{what} is of type {number}, which can't be read", f"one of {_READABLE}")
    kind = ggml_types()[number]
    needed = f", rows of {kind.name} are multiples of {kind.block_size}" if kind.block_size > 1 else ""
    valid = min(shape) >= 1 and max(shape) < 2**31 and shape[-1] % kind.block_size == 0
    cursor.check(valid, f"{what} is {list(shape)}, which is not a valid shape{needed}")
    return shape, kind, cursor.u64(what)


@contextmanager
def mmap_tensor(info: TensorInfo) -> Iterator[np.ndarray]:
    """Map the bytes of a tensor as uint8 `[rows, bytes per row]`; unmapped at the end of the block."""
    rows = math.prod(info.shape[:-1])
    with os_errors_as(CheckpointError, "read", info.path):
        if info.path.stat().st_size < info.offset + info.nbytes:
            raise CheckpointError(f"{info.path} has become shorter since it was opened")
        yield np.memmap(info.path, np.uint8, "r", info.offset, (rows, info.nbytes // rows))


class MetadataReader:
    """Look up and check values in the metadata of one file.

    `text`, `flag` and `id` take whole keys; `count`, `number` and `has` take keys below the architecture's prefix
    ("attention.head_count" for "llama.attention.head_count"). Each raises CheckpointError, naming the key, for a value
    of another type and for a missing one without a default. For a tokenizer, `error_type` is TokenizerError.
    """

    def __init__(self, header: Header, error_type: type[MlxlmError] = CheckpointError):
        self.header, self._error_type = header, error_type
        self.architecture = self.text("general.architecture")

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        return self._get(key, str, "a string", default)

    def flag(self, key: str, default: bool) -> bool:
        """True or false, or the default."""
        return self._get(key, bool, "true or false", default)

    def id(self, key: str) -> int | None:
        """A token id, or None; llama.cpp's converters write 2³² - 1 for none."""
        value = self._get(key, int, "a whole number", -1)
        return value if 0 <= value < 2**31 else None

    def count(self, short: str, default: int | None = None) -> int:
        """A size, which may also be an array with the same value for each layer."""
        key = f"{self.architecture}.{short}"
        value = self.header.metadata.get(key, default)
        if isinstance(value, Array) and not value.holds_strings and 0 < value.count <= len(self.header.tensors):
            values = value.read()
            self.check(
                all(other == values[0] for other in values),
                f"{key} differs between the layers, which this decoder doesn't support",
            )
            value = values[0]
        return self._check_size(key, value)

    def counts(self, short: str, layers: int) -> list[int]:
        """A size of each layer, which may also be one for all."""
        key, values = f"{self.architecture}.{short}", self._of_layers(short, layers)
        return [self.count(short)] * layers if values is None else [self._check_size(key, value) for value in values]

    def _of_layers(self, short: str, layers: int) -> list[Any] | None:
        """The values of a list with one for each layer; None if the key has no list."""
        key = f"{self.architecture}.{short}"
        value = self.header.metadata.get(key)
        if not isinstance(value, Array):
            return None
        self.check(value.count == layers, f"{key} has {value.count} values, one for each of {layers} layers is needed")
        return list(value.read())

    def _check_size(self, key: str, value: Any) -> int:
        value = self._check_type(key, int, "a whole number", value)
        self.check(0 <= value < 2**31, f"{key} is {value}, it must be a size")
        return value

    def flags(self, short: str, layers: int) -> list[bool] | None:
        """True or false for each layer; None if the key has no list."""
        key, values = f"{self.architecture}.{short}", self._of_layers(short, layers)
        return None if values is None else [self._check_type(key, bool, "true or false", value) for value in values]

    def number(self, short: str, default: float | None = None) -> float:
        """A float32 as its shortest decimal: 1e-05 and not 9.999999747378752e-06."""
        value = self._get(f"{self.architecture}.{short}", (int, float), "a number", default)
        return shortest_decimal(value)

    def has(self, short: str) -> bool:
        """Whether there is such a key."""
        return f"{self.architecture}.{short}" in self.header.metadata

    def has_tensor(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self.header.tensors

    def check(self, condition: bool, message: str, hint: str | None = None) -> None:
        """Raise an error that names the file unless `condition` holds."""
        if not condition:
            raise self.error(message, hint)

    def error(self, message: str, hint: str | None = None) -> MlxlmError:
        """An error that names the file."""
        return self._error_type(f"{self.header.path}: {message}", hint)

    def _get(self, key: str, kind: type | tuple[type, ...], expected: str, default: Any) -> Any:
        return self._check_type(key, kind, expected, self.header.metadata.get(key, default))

    def _check_type(self, key: str, kind: type | tuple[type, ...], expected: str, value: Any) -> Any:
        self.check(value is not None, f"the metadata lacks {key}")
        valid = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        self.check(valid, f"{key} must be {expected}")
        return value


def shortest_decimal(value: float) -> float:
    """The shortest decimal that is this float32."""
    return float(str(np.float32(value)))
