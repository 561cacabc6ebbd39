"""Tensors of a model in several files, with or without an index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mlxlm.checkpoint.lazy_tensor import LazyTensor
from mlxlm.checkpoint.locations import MAX_INDEX
from mlxlm.utils.bounded_reads import read_bytes
from mlxlm.utils.errors import CheckpointError, os_errors_as
from mlxlm.utils.json_files import parse_json_object

_MAX_VALUES = 250_000


def sharded_tensors(
    index: Path, files: Sequence[Path], read_file: Callable[[Path], Mapping[str, LazyTensor]]
) -> dict[str, LazyTensor]:
    """Describe the tensors of several files: those that `index` lists, if it exists, else all of `files`.

    Args:
        index: A Hugging Face index.
        files: The files of a model without an index.
        read_file: Describes the tensors of one file.

    Raises:
        CheckpointError: A tensor is in two files; or a listed file is missing, outside of the index's folder, or lacks
            one of its tensors.
    """
    if index.exists():
        return _indexed_tensors(index, read_file)
    tensors: dict[str, LazyTensor] = {}
    for file in files:
        for name, tensor in read_file(file).items():
            if name in tensors:
                raise CheckpointError(f"{file}: tensor {name} is also in another file of {file.parent}")
            tensors[name] = tensor
    return tensors


def _indexed_tensors(index: Path, read_file: Callable[[Path], Mapping[str, LazyTensor]]) -> dict[str, LazyTensor]:
    raw = read_bytes(index, MAX_INDEX, CheckpointError)
    if raw.count(b",") > _MAX_VALUES:
        raise CheckpointError(f"{index} has more than {_MAX_VALUES} values, more than any model has")
    weight_map = parse_json_object(raw, str(index), CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index} is malformed: weight_map is not an object of file names")
    listed = list(dict.fromkeys(weight_map.values()))
    for file in listed:
        if file in ("", ".", "..") or "/" in file or "\\" in file or "\0" in file:
            raise CheckpointError(f"{index} points outside its folder: {file}")
        with os_errors_as(CheckpointError, "find a file that is listed in", index):  # its name may be too long
            exists = (index.parent / file).is_file()
        if not exists:
            raise CheckpointError(f"{index}: {file} is missing", "download or copy the whole folder again")
    files = {file: read_file(index.parent / file) for file in listed}
    tensors = {}
    for name, file in weight_map.items():
        if name not in files[file]:
            raise CheckpointError(f"{index}: tensor {name} is not in {file}")
        tensors[name] = files[file][name]
    return tensors
