"""Folders and files that are not what they say, and repetitions."""

from __future__ import annotations

import json
import os

import pytest

from mlxlm.data import DataOptions, prepare, read_documents, total_bytes
from mlxlm.data.dedup import DuplicateFilter
from mlxlm.data.options import parse_weighted_sources
from mlxlm.data.text import Document
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


def _documents(texts):
    return [Document(str(i), iter((text,))) for i, text in enumerate(texts)]


def test_a_threshold_of_one_leaves_out_repetitions_alone():
    words = [f"w{i}" for i in range(400)]
    texts = [" ".join([*words[:200], f"other{n}", *words[200:]]) for n in range(200)]  # Jaccard 0.975 with each other
    unique = DuplicateFilter(1)
    assert len(list(unique(_documents([*texts, *texts])))) == 200
    assert (unique.stats.exact, unique.stats.near) == (200, 0)


def test_repetitions_are_found_in_crowded_buckets():
    words = " ".join(f"w{i}" for i in range(60))
    texts = [f"{words} end{n} of{n} this{n}" for n in range(120)]
    unique = DuplicateFilter(0.999)
    kept = len(list(unique(_documents(texts))))
    list(unique(_documents(texts)))
    assert unique.stats.exact + unique.stats.near == 240 - kept
    assert unique.stats.exact >= kept


def test_a_source_that_repeats_another_is_said_to(tmp_path, byte_level):
    (tmp_path / "a.txt").write_text("one and the same text " * 50)
    with pytest.raises(DataError, match="repeat earlier ones"):
        prepare(DataOptions([tmp_path / "a.txt"] * 2, weights=[0.5, 0.5], dedup=0.8), byte_level, tmp_path / "out")


def test_weights_that_rows_cannot_follow_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"smallest share is 0\.001"):
        parse_weighted_sources(["a.txt=1e-9", "b.txt=1"])
