"""Finds the data files in folders that Hugging Face's `save_to_disk` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxlm.utils.bounded_reads import read_bytes
from mlxlm.utils.errors import DataError
from mlxlm.utils.json_files import parse_json_object

_MAX_BYTES = 1 << 26  # of state.json


def hf_dataset_files(folder: Path) -> list[Path] | None:
    """The Arrow files of a saved `Dataset`, or of a `DatasetDict` with one split, in order; None for other folders.

    Raises:
        DataError: The folder is damaged, has several splits, or has a shuffled or filtered order of rows.
    """
    if (folder / "dataset_dict.json").is_file():
        return _only_split(folder)
    if not ((folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()):
        return None
    path = folder / "state.json"
    state = _read_object(path)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(f"{folder} was saved with an indices mapping", "dataset.flatten_indices().save_to_disk(...)")
    files = state.get("_data_files")
    if not isinstance(files, list):
        raise DataError(f"{path}: field '_data_files' is not a list", "saving the dataset again")
    return [folder / _file_name(file, path) for file in files]


def _only_split(folder: Path) -> list[Path]:
    path = folder / "dataset_dict.json"
    splits = _read_object(path).get("splits")
    if not (isinstance(splits, list) and splits and all(map(_is_name, splits))):
        raise DataError(f"{path}: field 'splits' is not a list of folder names", "saving the dataset again")
    if len(splits) > 1:
        hint = f"one of them, such as {folder / splits[0]}"
        raise DataError(f"{folder} has the splits {', '.join(splits)}", hint)
    nested = (folder / splits[0] / "dataset_dict.json").exists()  # a split is never divided again
    files = None if nested else hf_dataset_files(folder / splits[0])
    if files is None:
        raise DataError(
            f"{folder / splits[0]} is not a saved dataset: it has no state.json", "saving the dataset again"
        )
    return files


def _file_name(file: Any, path: Path) -> str:
    name = file.get("filename") if isinstance(file, dict) else None
    if isinstance(name, str) and _is_name(name):
        return name
    raise DataError(f"{path}: field '_data_files' has no plain file name in {file!r}", "saving the dataset again")


def _is_name(value: Any) -> bool:
    """Whether `value` is the name of something directly inside a folder."""
    return isinstance(value, str) and Path(value).name == value not in ("", "..")


def _read_object(path: Path) -> dict[str, Any]:
    return parse_json_object(read_bytes(path, _MAX_BYTES, DataError), str(path), DataError, "saving the dataset again")
