"""Finds the data files in folders that Hugging Face's `save_to_disk` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlxlm.utils.errors import DataError
from mlxlm.utils.json_files import read_json_object

_MAX_BYTES = 1 << 26  # of state.json
_HINT = "saving the dataset again"


def hf_dataset_files(folder: Path) -> list[Path] | None:
    """The Arrow files of a saved `Dataset`, or of a `DatasetDict` with one split, in order; None for other folders.

    Raises:
        DataError: The folder is damaged, has several splits, or has a shuffled or filtered order of rows.
    """
    if (folder / "dataset_dict.json").is_file():
        path = folder / "dataset_dict.json"
        splits = _names(read_json_object(path, _MAX_BYTES, DataError, _HINT).get("splits"), f"{path}: field 'splits'")
        if len(splits) != 1:
            hint = f"one of them, such as {folder / splits[0]}" if splits else _HINT
            raise DataError(f"{folder} has the splits {', '.join(splits) or 'none'}", hint)
        folder /= splits[0]
        if not (folder / "state.json").is_file():
            raise DataError(f"{folder} is not a saved dataset: it has no state.json", _HINT)
    elif not ((folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()):
        return None
    path = folder / "state.json"
    state = read_json_object(path, _MAX_BYTES, DataError, _HINT)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(f"{folder} was saved with an indices mapping", "dataset.flatten_indices().save_to_disk(...)")
    files = state.get("_data_files")
    if isinstance(files, list):
        files = [file.get("filename") if isinstance(file, dict) else None for file in files]
    return [folder / name for name in _names(files, f"{path}: field '_data_files'")]


def _names(names: Any, field: str) -> list[str]:
    """Check a list of names of something directly inside a folder."""
    if isinstance(names, list) and all(isinstance(n, str) and Path(n).name == n not in ("", "..") for n in names):
        return names
    raise DataError(f"{field} is not a list of plain names", _HINT)
