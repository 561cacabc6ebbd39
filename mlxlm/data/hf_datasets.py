"""Folders that Hugging Face's `Dataset.save_to_disk` and `DatasetDict.save_to_disk` write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxlm.utils.bounded_reads import read_bytes
from mlxlm.utils.errors import DataError
from mlxlm.utils.json_files import parse_json_object

_LARGEST = 1 << 26  # bytes of state.json, which names the files of data
_AGAIN = "dataset.flatten_indices().save_to_disk(...)"


def hf_dataset_files(folder: Path) -> list[Path] | None:
    """The arrow files with the rows of a saved dataset, in order; None if `folder` is none.

    Raises DataError, naming the file, for a damaged folder and for one of several splits: which of them to train on
    is not for us to guess.
    """
    if (folder / "dataset_dict.json").is_file():
        return _only_split(folder)
    if not ((folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()):
        return None
    path = folder / "state.json"
    state = _object(path)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(f"{folder} was saved with an order of rows of its own", _AGAIN)
    files = state.get("_data_files")
    if not isinstance(files, list):
        raise DataError(f"{path}: field '_data_files' is not a list", "saving the dataset again")
    return [folder / _file_name(file, path) for file in files]


def _only_split(folder: Path) -> list[Path]:
    path = folder / "dataset_dict.json"
    splits = _object(path).get("splits")
    if not (isinstance(splits, list) and splits and all(map(_is_name, splits))):
        raise DataError(f"{path}: field 'splits' is not a list of folder names", "saving the dataset again")
    if len(splits) > 1:
        hint = f"one of them, such as {folder / splits[0]}"
        raise DataError(f"{folder} has the splits {', '.join(splits)}", hint)
    nested = (folder / splits[0] / "dataset_dict.json").exists()  # a split is never divided again
    files = None if nested else hf_dataset_files(folder / splits[0])
    if files is None:
        raise DataError(f"{folder / splits[0]} is no saved dataset: it has no state.json", "saving the dataset again")
    return files


def _file_name(file: Any, path: Path) -> str:
    name = file.get("filename") if isinstance(file, dict) else None
    if not _is_name(name):
        raise DataError(f"{path}: field '_data_files' has no plain file name in {file!r}", "saving the dataset again")
    return name


def _is_name(value: Any) -> bool:
    """Whether it names something directly inside a folder."""
    return isinstance(value, str) and Path(value).name == value not in ("", "..")


def _object(path: Path) -> dict[str, Any]:
    return parse_json_object(read_bytes(path, _LARGEST, DataError), str(path), DataError, "saving the dataset again")
