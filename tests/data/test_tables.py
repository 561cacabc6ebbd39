"""Parquet and Arrow files, and folders of `save_to_disk`: read, refused, damaged."""

import builtins
import json
import random

import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="needs pyarrow (pip install 'mlxlm[data]')")
parquet = pytest.importorskip("pyarrow.parquet")

from mlxlm.data import read_documents, read_texts, total_bytes  # noqa: E402
from mlxlm.utils.errors import DataError  # noqa: E402

TEXTS = [f"river {i}\n" + "stone 東京 " * (i % 7) for i in range(200)]
CHAT = [[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "water"}]] * 3


def read(*paths, **options):
    return [("".join(d.pieces), d.messages) for d in read_documents(paths, **options)]


def write(path, columns, **options):
    table = pa.table(columns)
    if path.suffix == ".parquet":
        parquet.write_table(table, path, **options)
    else:
        new = pa.ipc.new_file if options.pop("file", False) else pa.ipc.new_stream
        with pa.OSFile(str(path), "wb") as sink, new(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=50)
    return path


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.parquet", {"row_group_size": 30}),
        ("a.parquet", {"compression": "zstd", "use_dictionary": False}),
        ("a.arrow", {}),
        ("a.arrow", {"file": True}),
    ],
)
def test_a_document_for_each_row(tmp_path, name, options):
    cells = [*TEXTS, None, "", "last"]
    path = write(tmp_path / name, {"id": range(len(cells)), "text": cells}, **options)
    seen = []
    assert read(path, advance=seen.append) == [(text, None) for text in [*TEXTS, "last"]]
    assert sum(seen) == path.stat().st_size == total_bytes([path]) and len(seen) > 2
    assert "".join(read_texts([path])) == "".join(TEXTS) + "last"
    location = [d.location for d in read_documents([path])]
    assert (location[0], location[-1]) == (f"{path}, row 1", f"{path}, row {len(cells)}")


@pytest.mark.parametrize("kind", [pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())])
def test_kinds_of_text(tmp_path, kind):
    column = pa.array(TEXTS).cast(kind) if kind != pa.string_view() else pa.array(TEXTS, kind)
    assert [text for text, _ in read(write(tmp_path / "a.arrow", {"text": column}))] == TEXTS


def test_conversations_and_other_columns(tmp_path):
    for name in ("a.parquet", "a.arrow"):
        path = write(tmp_path / name, {"messages": CHAT, "story": TEXTS[:3], "talk": CHAT})
        expected = [("", [{**message, "weight": 1} for message in CHAT[0]])] * 3
        assert read(path) == read(path, text_column="talk") == expected
        assert [text for text, _ in read(path, text_column="story")] == TEXTS[:3]
    row = {"text": "no", "story": "yes", "talk": CHAT[0]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    assert read(tmp_path / "a.jsonl", text_column="story") == [("yes", None)]
    assert read(tmp_path / "a.jsonl", text_column="talk") == expected[:1]
    with pytest.raises(DataError, match="has no 'other'; its fields are 'text', 'story', 'talk' .*`text_column"):
        read(tmp_path / "a.jsonl", text_column="other")


def test_folders_of_save_to_disk(tmp_path):
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": TEXTS})
    data.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    (tmp_path / "saved" / "cache-1234.arrow").write_bytes(b"of a map, not of the data")
    assert [text for text, _ in read(tmp_path / "saved")] == TEXTS
    data.shuffle(seed=1).save_to_disk(str(tmp_path / "shuffled"))
    assert [text for text, _ in read(tmp_path / "shuffled")] == data.shuffle(seed=1)["text"][:]
    both = datasets.DatasetDict({"train": data.select(range(150)), "test": data.select(range(150, 200))})
    both.save_to_disk(str(tmp_path / "both"))
    with pytest.raises(DataError, match="both has the splits train, test .*both/train"):
        read(tmp_path / "both")
    with pytest.raises(DataError, match="both has the splits"):
        total_bytes([tmp_path])
    assert [text for text, _ in read(tmp_path / "both" / "test")] == TEXTS[150:]
    datasets.DatasetDict({"train": data}).save_to_disk(str(tmp_path / "one"))
    assert [text for text, _ in read(tmp_path / "one")] == TEXTS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("state.json", "{", "state.json is not JSON"),
        ("state.json", '{"_data_files": 3}', "field '_data_files' is not a list"),
        ("state.json", '{"_data_files": [{"filename": "../../x.arrow"}]}', "not a list of plain names"),
        ("state.json", '{"_data_files": [{}]}', "not a list of plain names"),
        ("state.json", '{"_data_files": [], "_indices_data_files": [{"filename": "i"}]}', "flatten_indices"),
        ("dataset_dict.json", '{"splits": ["../train"]}', "field 'splits' is not a list of plain names"),
        ("dataset_dict.json", '{"splits": ["train"]}', "train is not a saved dataset"),
    ],
)
def test_folders_that_are_damaged(tmp_path, name, content, message):
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path)


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"txt": ["a"], "n": [1]}, {}, "has no known format; its columns are 'txt', 'n' .*`text_column"),
        ({"text": ["a"]}, {"text_column": "story"}, "has no 'story'; its columns are 'text'"),
        ({"text": [1, 2]}, {}, "row 1: 'text' is not text but int"),
        ({"text": [b"\xff"]}, {}, "row 1: 'text' is not text but bytes"),
        ({"messages": ["hi"]}, {}, "row 1: 'messages' is not a list"),
        (
            {"messages": [CHAT[0], [{"role": "user", "content": None}]]},
            {},
            "row 2: a message must have 'role' and 'content'",
        ),
        ({"messages": CHAT[:1], "tools": ["f"]}, {}, "row 1: 'tools' is not a list"),
        ({"text": pa.array([], pa.string())}, {}, "is empty"),
    ],
)
@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_tables_that_cannot_be_used(tmp_path, name, columns, options, message):
    path = write(tmp_path / name, columns)
    with pytest.raises(DataError, match=f"{name}.*{message}"):
        read(path, **options)


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_damaged_files_end_in_an_error_that_names_them(tmp_path, name):
    whole = write(tmp_path / name, {"text": TEXTS}).read_bytes()
    draw = random.Random(0)
    path = tmp_path / f"b{name[1:]}"
    failed = 0
    for content in (b"", b"PAR1", b"ARROW1\0\0", whole[:-9], whole[: len(whole) // 2], b"\xff" * 100):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"b{name[1:]}"):
            read(path)
    for _ in range(150):
        content = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(len(content))] = draw.randrange(256)
        path.write_bytes(content)
        try:
            found = read(path)
        except DataError as error:
            assert str(path) in str(error)
            failed += 1
        else:
            assert all(isinstance(text, str) for text, _ in found)
    assert failed > 20


def test_offsets_are_checked_before_they_are_followed(tmp_path):
    """Arrow takes the offsets of a file at their word."""
    texts = ["aaaa", "bbbb", "cccc"]
    path = write(tmp_path / "a.arrow", {"text": texts})
    content = path.read_bytes()
    offsets = np.array([0, 4, 8, 12], np.int32).tobytes()
    assert content.count(offsets) == 1
    path.write_bytes(content.replace(offsets, np.array([0, 4, 1 << 30, 12], np.int32).tobytes()))
    with pytest.raises(DataError, match="a.arrow is damaged"):
        read(path)


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", {"text": ["a"]})
    real = builtins.__import__

    def missing(name, *rest, **more):
        if name.partition(".")[0] == "pyarrow":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(DataError, match=r"a.parquet needs pyarrow .*mlxlm\[data\]"):
        read(path)
