"""Folders and files that are not what they say, and repetitions."""

from __future__ import annotations

import json
import os

import pytest

from mlxlm.data import read_documents, total_bytes
from mlxlm.utils.errors import DataError


def _saved(folder, files):
    folder.mkdir(parents=True)
    (folder / "dataset_info.json").write_text("{}")
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in files]}))
    return folder


def test_a_missing_or_empty_file_of_a_saved_dataset_is_named(tmp_path):
    pytest.importorskip("pyarrow")
    folder = _saved(tmp_path / "saved", ["data-0.arrow"])
    for read in (lambda: list(read_documents([folder])), lambda: total_bytes([folder])):
        with pytest.raises(DataError, match=r"data-0\.arrow"):
            read()
    (folder / "data-0.arrow").write_bytes(b"")
    with pytest.raises(DataError, match=r"data-0\.arrow"):
        list(read_documents([folder]))


@pytest.mark.parametrize("name", ["..", ".", ""])
def test_a_dataset_of_splits_stays_in_its_folder(tmp_path, name):
    outer = tmp_path / "outer"
    (outer / "inner").mkdir(parents=True)
    (outer / "dataset_dict.json").write_text(json.dumps({"splits": ["inner"]}))
    (outer / "inner" / "dataset_dict.json").write_text(json.dumps({"splits": [name]}))
    with pytest.raises(DataError, match="saved dataset"):
        list(read_documents([outer]))
    with pytest.raises(DataError, match="splits"):
        list(read_documents([outer / "inner"]))


def test_a_pipe_in_a_folder_is_not_waited_for(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "b.txt")
    assert ["".join(d.pieces) for d in read_documents([tmp_path])] == ["text"]


def test_null_is_no_text_in_lines_as_in_tables(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": null}\n{"text": "a", "messages": null}\n{"text": null, "messages": null}\n')
    assert ["".join(d.pieces) for d in read_documents([file])] == ["a"]
