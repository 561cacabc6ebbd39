"""Datasets on the hub: read in parts, which files are read, errors."""

import gzip
import json
from functools import partial

import huggingface_hub
import pytest
from huggingface_hub import constants

from mlxlm.data import DataOptions, read_documents, total_bytes
from mlxlm.utils.errors import DataError
from tests.checkpoint.fake_hub import FakeHub

DATASET = "hf://datasets/owner/name"
ROWS = [{"prompt": f"{i}?" + "stone 東京 " * 900, "completion": f"{i}!"} for i in range(300)]


@pytest.fixture
def hub(monkeypatch):
    """A hub with a dataset, and huggingface_hub without what it knows of another."""
    server = FakeHub({})
    monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)  # HF_ENDPOINT is only read when it is imported
    url = server.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
    new = partial(huggingface_hub.HfFileSystem, endpoint=server.endpoint, block_size=1 << 16, skip_instance_cache=True)
    monkeypatch.setattr(huggingface_hub, "HfFileSystem", new)
    for name in ("HF_HUB_OFFLINE", "MLXLM_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.close()


def lines(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def parquet_file(tmp_path):
    pyarrow, parquet = (pytest.importorskip(module) for module in ("pyarrow", "pyarrow.parquet"))
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    other = [f"{i} " * 3000 for i in range(len(ROWS))]
    path = tmp_path / "a.parquet"
    options = {"compression": "none", "use_dictionary": False, "write_batch_size": 20}
    parquet.write_table(pyarrow.table({**columns, "other": other}), path, **options)
    return path.read_bytes()


def messages(path):
    return [document.messages for document in read_documents([path])]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_no_file_is_downloaded_whole_before_it_is_read(hub, tmp_path, name):
    contents = {"a.jsonl": lines(ROWS), "a.json": json.dumps(ROWS).encode()}
    content = contents[name] if name in contents else parquet_file(tmp_path)
    hub.files[name] = content
    documents = read_documents([DATASET])
    first = next(documents)
    assert first.messages[1]["content"] == "0!" and first.location.startswith(f"{DATASET}/{name}, ")
    assert 0 < hub.sent < len(content) / 2 and all(int(r.rpartition("-")[2]) >= 0 for r in hub.ranges)
    assert [document.messages[1]["content"] for document in documents] == [f"{i}!" for i in range(1, 300)]
    if name == "a.parquet":
        assert hub.sent < 0.75 * len(content)  # the column that no format has is not read
    assert total_bytes([DATASET]) == len(content)


def test_the_training_files_of_a_dataset(hub):
    row = {"question": "a", "answer": "b"}
    names = ("README.md", "dataset_infos.json", "data/test-00000-of-00001.jsonl", "data/train-00000-of-00002.jsonl")
    hub.files.update({name: lines([row]) for name in (*names, "data/train-00001-of-00002.jsonl")})
    hub.files["more/b.jsonl.gz"] = gzip.compress(lines([row] * 3))
    counts = {"": 2, "/data": 2, "@v1": 2, "/data/test-00000-of-00001.jsonl": 1, "/data/*.jsonl": 3, "/more": 3}
    assert {path: len(messages(DATASET + path)) for path in counts} == counts
    hub.files["other/train.csv"] = b"question,answer\na,b\n"
    with pytest.raises(
        DataError, match=r"several splits .*try: one of them: \S+/data/train\*.jsonl or \S+/train.csv\)"
    ):
        messages(DATASET)
    assert len(messages(f"{DATASET}/data/train*.jsonl")) == 2 and len(messages(f"{DATASET}/other")) == 1
    assert DataOptions([DATASET]).source_names() == ["name"]


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("hf://datasets/owner", "hf://datasets/owner is not the address of a dataset .try: hf://datasets/OWNER/NAME"),
        ("hf://owner/name", "is not the address of a dataset"),
        (f"{DATASET}/absent", "owner/name/absent has no files to read"),
        ("hf://datasets/owner/absent", "there is no path owner/absent, nor a dataset of this name on the hub"),
        ("hf://datasets/owner/gated", "owner/gated is gated .try: request access at .*/datasets/owner/gated"),
    ],
)
def test_errors(hub, path, problem):
    hub.files["a.txt"] = b"text"
    with pytest.raises(DataError, match=problem):
        messages(path)


def test_without_the_hub(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DataError, match="the Hugging Face hub can't be reached .try: .*OFFLINE"):
        messages(DATASET)
