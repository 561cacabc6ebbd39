"""The tensors of a model that lies in several files, with or without an index of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mlxlm.checkpoint.lazy_tensor import LazyTensor
from mlxlm.utils.bounded_reads import read_bytes
from mlxlm.utils.errors import CheckpointError, os_errors_as
from mlxlm.utils.json_files import parse_json_object

_MAX_INDEX = 24_000_000  # bytes
_MAX_VALUES = 250_000
_MAX_FILES = 1_000
_MAX_TENSORS = 50_000  # of all files, and one more for each megabyte: DeepSeek-V3 has 92,000 in 690 GB


def joined_tensors(
    files: Sequence[Path], read_file: Callable[[Path], Mapping[str, LazyTensor]]
) -> dict[str, LazyTensor]:
    """The tensors of several files together, `read_file` reading one. Raises CheckpointError for a tensor that is in
    two of them."""
    tensors: dict[str, LazyTensor] = {}
    for file, found in _each(files, read_file):
        for name, tensor in found.items():
            if name in tensors:
                raise CheckpointError(f"{file}: tensor {name} is in another file of {file.parent} too")
            tensors[name] = tensor
    return tensors


def indexed_tensors(index: Path, read_file: Callable[[Path], Mapping[str, LazyTensor]]) -> dict[str, LazyTensor]:
    """The tensors that a Hugging Face index lists, each out of the file it names, `read_file` reading one.

    Raises CheckpointError for a file outside the index's folder or not there, and for a tensor that isn't in its file.
    """
    weight_map = json_object(read_bytes(index, _MAX_INDEX, CheckpointError), str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index} is malformed: weight_map is not an object of file names")
    listed = list(dict.fromkeys(weight_map.values()))
    for file in listed[:_MAX_FILES]:
        if file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise CheckpointError(f"{index} points outside its folder: {file}")
        with os_errors_as(CheckpointError, "find a file that is listed in", index):  # its name may be too long
            there = (index.parent / file).is_file()
        if not there:
            raise CheckpointError(f"{index}: {file} is missing", "download or copy the whole folder again")
    files = {file.name: found for file, found in _each([index.parent / file for file in listed], read_file)}
    tensors = {}
    for name, file in weight_map.items():
        if name not in files[file]:
            raise CheckpointError(f"{index}: tensor {name} is not in {file}")
        tensors[name] = files[file][name]
    return tensors


def _each(
    files: Sequence[Path], read_file: Callable[[Path], Mapping[str, LazyTensor]]
) -> Iterator[tuple[Path, Mapping[str, LazyTensor]]]:
    """Each file with its tensors, as long as there aren't more of them than a model has."""
    if len(files) > _MAX_FILES:
        raise CheckpointError(f"{files[0].parent}: {len(files)} files of weights, more than any model has")
    room = _MAX_TENSORS
    for file in files:
        found = read_file(file)
        room += (file.stat().st_size >> 20) - len(found)
        if room < 0:
            raise CheckpointError(f"{file}: with it, the files have more tensors than any model of their size")
        yield file, found


def json_object(raw: bytes, name: str) -> dict[str, Any]:
    """The JSON object in `raw`, with no more values than fit in little memory."""
    if raw.count(b",") > _MAX_VALUES:
        raise CheckpointError(f"{name} has more than {_MAX_VALUES} values, more than any model has")
    return parse_json_object(raw, name, CheckpointError)
