import codecs
import csv
import gzip
import io
import json
import os

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxlm.data import BadInput, read_documents, read_texts, total_bytes
from mlxlm.data.rows import _array_elements
from mlxlm.data.text import PIECE_CHARS, READ_BYTES
from mlxlm.utils.errors import DataError


def read(*paths, **options):
    return [(d.location, "".join(d.pieces), d.messages) for d in read_documents(paths, **options)]


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def test_a_text_file_is_one_document_unchanged(tmp_path, text):
    content = "\r\n\t a\r\r\n" + text(30_000)
    path = write(tmp_path / "a.txt", content)
    [(location, pieces, messages)] = [(d.location, list(d.pieces), d.messages) for d in read_documents([path])]
    assert "".join(pieces) == content
    assert location == str(path) and messages is None
    assert len(pieces) > 3 and max(map(len, pieces)) <= PIECE_CHARS
    for piece, following in zip(pieces, pieces[1:], strict=False):
        assert piece.endswith("\n") and not following[0].isspace()


@pytest.mark.parametrize("unit", ["x", "x ", "  ", "\n", "漢", "word\n "])
def test_texts_without_good_cuts_are_cut_anyway(tmp_path, unit):
    content = unit * (5 * PIECE_CHARS // len(unit) + 3)
    [pieces] = [list(d.pieces) for d in read_documents([write(tmp_path / "a.txt", content)])]
    assert "".join(pieces) == content and max(map(len, pieces)) <= PIECE_CHARS


@given(content=st.text(st.sampled_from("a \n漢🎉\r\t"), max_size=200), size=st.integers(1, 9))
@settings(max_examples=40)
def test_reads_that_end_anywhere(content, size):
    class Trickle(io.BytesIO):
        def read(self, n=-1):
            return super().read(size)

    if content:
        assert read("-", stdin=Trickle(content.encode("utf-8"))) == [("stdin", content, None)]


def test_a_byte_order_mark_is_removed(tmp_path):
    assert read(write(tmp_path / "a.txt", b"\xef\xbb\xbfhello"))[0][1] == "hello"
    row = b'\xef\xbb\xbf{"text": "hello"}\n'
    assert read(write(tmp_path / "a.jsonl", row))[0][1] == "hello"


def _messages(*contents):
    roles = ("system", "user", "assistant") if len(contents) == 3 else ("user", "assistant")
    return [{"role": role, "content": text, "weight": 1} for role, text in zip(roles, contents, strict=True)]


TURNS = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
CALL, TOOL = {"name": "f", "arguments": {"x": 1}}, {"type": "function", "function": {"name": "f"}}
CALL_TURNS = [{"from": "function_call", "value": json.dumps(CALL)}, {"from": "observation", "value": "3"}]
CALLING = {"role": "assistant", "content": "", "weight": 1, "tool_calls": [{"type": "function", "function": CALL}]}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
RESULT = {"role": "tool", "content": "3", "weight": 1}


def _context(*messages):
    return [message | {"weight": 0} for message in messages]


@pytest.mark.parametrize(
    ("format", "row", "messages"),
    [
        ("prompt and completion", {"prompt": "a", "completion": "b", "id": 1}, _messages("a", "b")),
        (
            "prompt and completion",  # answers in a prompt are context
            {"prompt": _messages("a", "b", "c")[1:], "completion": [{"role": "assistant", "content": "b"}]},
            [*_context(*_messages("a", "b", "c")[1:]), *_messages("a", "b")[1:]],
        ),
        ("Alpaca", {"instruction": "a", "input": "c", "output": "b", "text": "a c b"}, _messages("a\n\nc", "b")),
        ("Alpaca", {"instruction": "a", "input": "", "output": "b", "system": "s"}, _messages("s", "a", "b")),
        ("Dolly", {"instruction": "a", "context": "c", "response": "b"}, _messages("a\n\nc", "b")),
        ("question and answer", {"question": "a", "answer": "b"}, _messages("a", "b")),
        ("messages", {"messages": _messages("x", "y"), "prompt": "a", "completion": "b"}, _messages("x", "y")),
        ("conversations", {"conversations": TURNS, "system": "s"}, _messages("s", "a", "b")),
        ("conversations", {"conversations": _messages("a", "b")}, _messages("a", "b")),
        ("conversations", {"conversations": json.dumps(TURNS)}, _messages("a", "b")),
        (
            "conversations",
            {"conversations": CALL_TURNS},
            [CALLING, RESULT],
        ),
        (
            "messages",
            {"messages": [{"role": "developer", "content": PARTS, "weight": 0}]},
            [{"role": "developer", "content": "a\nb", "weight": 0}],
        ),
    ],
)  # fmt: skip
def test_formats_of_conversations_in_lines_arrays_and_tables(tmp_path, format, row, messages):
    """A table has nulls where only other rows have a field, and tools as JSON text."""
    row = {**row, "tools": json.dumps([TOOL])} if format not in ("Dolly", "question and answer") else row
    lines, array = f"{json.dumps(row)}\n" * 2, json.dumps([row, row], indent=1)
    files = {"a.jsonl": lines, "a.json": lines, "b.json": array, "c.json": f"\n{array}\n"}
    paths = [write(tmp_path / name, content) for name, content in files.items()]
    pyarrow, parquet = (pytest.importorskip(module) for module in ("pyarrow", "pyarrow.parquet"))
    parquet.write_table(pyarrow.Table.from_pylist([row, row]), tmp_path / "a.parquet")
    for path in [*paths, tmp_path / "a.parquet"]:
        documents = list(read_documents([path]))
        assert [(d.messages, d.format) for d in documents] == [(messages, format)] * 2
        assert documents[0].tools == ([TOOL] if "tools" in row else [])


@given(
    rows=st.lists(st.dictionaries(st.sampled_from(["text", "n"]), st.text(max_size=30), min_size=1), max_size=8),
    indent=st.sampled_from([None, 0, 3]),
    size=st.integers(1, 50),
)
@settings(max_examples=40)
def test_elements_of_an_array_that_reads_end_within(rows, indent, size):
    class Trickle(io.BufferedReader):
        def read(self, n=-1):
            return super().read(min(n, size))

    content = json.dumps(rows, indent=indent, ensure_ascii=False).encode("utf-8", "surrogatepass")
    assert list(_array_elements(Trickle(io.BytesIO(content)), "a.json")) == rows
    for damaged in (content[:-1], content + b"1", content[:-1] + b",]"):
        with pytest.raises(DataError, match="a.json is not valid JSON|has more behind"):
            list(_array_elements(Trickle(io.BytesIO(damaged)), "a.json"))


def test_pairs_in_a_csv_table(tmp_path):
    path = write(tmp_path / "a.csv", b'n,prompt,completion\n1,"a, b",c\n\n2,d,e\n')
    assert [d.messages for d in read_documents([path])] == [_messages("a, b", "c"), _messages("d", "e")]
    assert [text for _, text, _ in read(path, text_column="prompt")] == ["a, b", "d"]


@pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.tsv", "\t"), ("a.csv.gz", ",")])
def test_delimited_tables(tmp_path, name, delimiter):
    rows = [("id", "text", "story"), ("1", 'one, "two"\nthree', "x"), ("2", "", "y"), ("3", "漢 \t", "z")]
    buffer = io.StringIO(newline="")
    csv.writer(buffer, delimiter=delimiter).writerows([*rows, ("4",)])
    content = codecs.BOM_UTF8 + buffer.getvalue().encode()
    path = write(tmp_path / name, gzip.compress(content) if name.endswith("gz") else content)
    expected = [(f"{path}, row 1", rows[1][1], None), (f"{path}, row 3", rows[3][1], None)]
    assert read(path) == read(tmp_path) == expected
    assert [text for _, text, _ in read(path, text_column="story")] == ["x", "y", "z"]
    assert sum(len(text) for text in read_texts([path])) and total_bytes([path]) == path.stat().st_size


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "a.csv is empty"),
        (b"id,story\n1,x\n", "its columns are 'id', 'story' .*`text_column=NAME`"),
        (b"text\n", "a.csv is empty"),
        (b'text\none\n"two', "damaged after row 1: unexpected end of data"),
        (b"text\none\ncaf\xe9\n", "row 2 is not UTF-8 text"),
        ("text\none\n".encode("utf-16"), "is not UTF-8 text"),
    ],
)
def test_bad_delimited_tables(tmp_path, content, problem):
    with pytest.raises(DataError, match=problem):
        read(write(tmp_path / "a.csv", content))


def test_plain_text_has_no_columns(tmp_path):
    for source, stdin in ((write(tmp_path / "a.txt", "hello"), None), ("-", io.BytesIO(b"hello"))):
        with pytest.raises(DataError, match="is plain text, without a column 'story' .*csv"):
            read(source, stdin=stdin, text_column="story")


def test_json_lines(tmp_path):
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]
    rows = [{"text": "one", "id": 3}, {"messages": chat}, {"text": ""}, {"text": "two\n\u0000"}, {"messages": []}]
    path = write(tmp_path / "a.jsonl", "\n\n".join(map(json.dumps, rows)))
    assert read(path) == [
        (f"{path}, line 1", "one", None),
        (f"{path}, line 3", "", [{**message, "weight": 1} for message in chat]),
        (f"{path}, line 7", "two\n\0", None),
    ]
    assert list(read_texts([path])) == ["one", "hi", "", "two\n\0"]


def test_conversations_for_fine_tuning(tmp_path):
    """As OpenAI's: weights, calls without text, tools. Other fields are kept or ignored."""
    tools, calls = [{"type": "function"}], [{"function": {"name": "f", "arguments": "{}"}}]
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": calls, "weight": 0, "time": 3}]
    row = {"messages": chat, "tools": tools, "parallel_tool_calls": False, "id": 1}
    [document] = read_documents([write(tmp_path / "a.jsonl", json.dumps(row))])
    assert document.messages == [{**chat[0], "weight": 1}, {**chat[1], "content": ""}] and document.tools == tools


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_compressed_files(tmp_path, name, text):
    content = text(20_000) if name == "a.txt" else json.dumps({"text": text(20_000)}) + "\n"
    data = content.encode("utf-8")
    plain = read(write(tmp_path / name, data))[0][1]
    zipped = gzip.compress(data[:1000]) + gzip.compress(data[1000:])
    assert read(write(tmp_path / f"{name}.gz", zipped))[0][1] == plain
    frames = zstandard.compress(data[:1000]) + zstandard.compress(data[1000:])
    assert read(write(tmp_path / f"{name}.zst", frames))[0][1] == plain


def test_folders(tmp_path):
    for name in ("b.txt", "a.md", "sub/c.jsonl", "sub/d.txt.gz", "empty.txt", "x.py", ".hidden.txt", ".git/e.txt"):
        content = b"" if name == "empty.txt" else name.encode()
        if name.endswith(".jsonl"):
            content = json.dumps({"text": name}).encode()
        write(tmp_path / name, gzip.compress(content) if name.endswith(".gz") else content)
    assert [text for _, text, _ in read(tmp_path)] == ["a.md", "b.txt", "sub/c.jsonl", "sub/d.txt.gz"]


def test_stdin_and_progress(tmp_path, text):
    path = write(tmp_path / "a.txt.gz", gzip.compress(text(20_000).encode()))
    seen = []
    read(path, advance=seen.append)
    assert sum(seen) == path.stat().st_size == total_bytes([path])
    seen = []
    assert read("-", stdin=io.BytesIO(b"hello"), advance=seen.append) == [("stdin", "hello", None)]
    assert sum(seen) == 5
    assert total_bytes([path, "-"]) is None


def _chat(**fields):
    return json.dumps({"messages": [{"role": "assistant", "content": "!", **fields}]}).encode()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt is empty"),
        ("a.txt", b"\xef\xbb\xbf", "a.txt is empty"),
        ("a.jsonl", b" \n\n", "a.jsonl is empty"),
        ("a.txt", b"abc\xff", "a.txt is not UTF-8 text: 0xFF at byte 3"),
        ("a.txt", b"abc\0", "a.txt is not UTF-8 text: a zero byte at byte 3"),
        ("a.txt", b"x" * 65_535 + "é".encode() + b"\xe9a", "0xE9 at byte 65537"),
        ("a.txt", b"x" * 65_535 + b"\xc3\x28", "0xC3 at byte 65535"),
        ("a.txt", b"abc\xc3", "0xC3 at byte 3"),
        ("a.txt", "hello".encode("utf-16"), "a.txt is UTF-16, not UTF-8 text .*iconv -f UTF-16"),
        ("a.txt.gz", b"hello", "cannot read .*a.txt.gz: .*[Nn]ot a gzipped file"),
        ("a.txt.gz", gzip.compress(b"hello" * 1000, mtime=0)[:-9], "a.txt.gz is damaged"),
        ("a.txt.zst", b"hello", "a.txt.zst is damaged"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl, line 2 is not valid JSON"),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"txt": "b"}\n',
            "line 2 has no known format; its fields are 'txt' .try: .*messages",
        ),
        ("a.jsonl", b'["text"]\n', "row 1 is not a JSON object .try: records with"),
        (
            "a.json",
            b'\n[{"text": "a"},\n{"txt": "b"}]',
            "row 2 has no known format; its fields are 'txt'",
        ),
        ("a.json", b'[{"text": "a"}', "a.json is not valid JSON"),
        ("a.json", b'[{"text": "\xff"}]', "a.json is not UTF-8 text: 0xFF at byte 11"),
        ("a.jsonl", b'{"prompt": 1, "completion": "b"}', "line 1: 'prompt' is not text but int"),
        ("a.jsonl", b'{"prompt": "a", "completion": null}', "line 1: 'completion' is null"),
        ("a.jsonl", _chat(content=[{"type": "image_url"}]), "part of the content is {'type': 'image_url'}, not text"),
        ("a.jsonl", _chat(content=[{"type": "text"}]), "line 1: 'text' is not text but NoneType"),
        ("a.jsonl", b'{"conversations": [{"from": "function_call", "value": "f"}]}', "'value' is not valid JSON"),
        ("a.csv", b"text,text\na,b\n", "has several columns 'text'"),
        ("a.jsonl", b'{"prompt": [1], "completion": []}', "line 1: a message must have 'role' and 'content'"),
        ("a.csv", b"prompt,completion\na,\xff\n", "row 1 is not UTF-8 text"),
        ("a.jsonl", b'{"text": 3}\n', "line 1: 'text' is not text but int"),
        ("a.jsonl", b'{"text": "\\ud83d"}\n', "line 1: 'text' has half of a surrogate pair at 0"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "line 2 is not UTF-8 text: 0xFF at byte 24"),
        ("a.jsonl", b'{"messages": "hi"}\n', "line 1: 'messages' is not a list"),
        ("a.jsonl", b'{"messages": [{"role": "user"}]}\n', "line 1: a message must have 'role' and 'content'"),
        ("a.jsonl", _chat(content=None), "line 1: 'content' is not text but NoneType"),
        ("a.jsonl", _chat(weight=0.5), "line 1: 'weight' is 0.5 .try: 0 or 1"),
        ("a.jsonl", _chat(weight=True), "line 1: 'weight' is True"),
        ("a.jsonl", _chat(weight=[]), r"line 1: 'weight' is \[\]"),
        ("a.jsonl", _chat(function_call={}), "line 1: 'function_call' is not supported .try: \"tool_calls\""),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": "?"}], "tools": "f"}', "'tools' is not a list"),
        ("a.jsonl", b'{"messages": [{"role": "user", "content": "?"}], "functions": []}', "'functions' is not supp"),
        ("a.jsonl", b"[" * 100_000, "is not valid JSON"),
    ],
)
def test_bad_files_are_named(tmp_path, name, content, message):
    path = write(tmp_path / name, content)
    with pytest.raises(DataError, match=message):
        read(path)


def test_bad_lines_of_a_text_are_named_and_skipped(tmp_path):
    """Wherever reads end: the lines around one are as they were."""
    lines = [f"line {i} 漢\r\n".encode() for i in range(20_000)]
    for at in (0, 7, 9_000, 19_999):
        lines[at] = b"bad \xff\xfe, zero \0 line\n" if at == 9_000 else b"bad \xc3\n"
    path = write(tmp_path / "a.txt", b"".join(lines) + b"end \xe6")
    with pytest.raises(DataError, match="a.txt is not UTF-8 text: 0xC3 at byte 4, in line 1"):
        read(path)
    bad = BadInput("skip")
    [(_, content, _)] = read(path, on_bad=bad)
    assert bad.skipped == 5
    assert content == "".join(f"line {i} 漢\r\n" for i in range(20_000) if i not in (0, 7, 9_000, 19_999))


def test_a_long_line_ends_within_a_character(tmp_path):
    content = "x" + "é漢🎉" * 40_000
    bad = BadInput("skip")
    assert read(write(tmp_path / "a.txt", content), on_bad=bad)[0][1] == content and not bad.skipped


def test_bad_rows_are_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr("mlxlm.data.rows.MAX_ROW_BYTES", 60)
    rows = [b'{"text": "a"}', b'{"text": "b', b'{"text": "' + b"c" * 200 + b'"}', b'{"txt": ""}', b'{"text": "\xff"}']
    path = write(tmp_path / "a.jsonl", b"\n".join([*rows, b'{"text": "d"}']))
    bad = BadInput("skip")
    assert [(location[-6:], text) for location, text, _ in read(path, on_bad=bad)] == [("line 1", "a"), ("line 6", "d")]
    assert bad.skipped == 4
    table = write(tmp_path / "a.csv", b"text\none\ncaf\xe9\ntwo\n")
    assert [text for _, text, _ in read(table, on_bad=bad)] == ["one", "two"] and bad.skipped == 5
    for content in (b"hello".decode().encode("utf-16"), b""):
        with pytest.raises(DataError, match="UTF-16|is empty"):
            read(write(tmp_path / "b.txt", content), on_bad=bad)


def test_paths_without_text(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        read(tmp_path / "absent")
    with pytest.raises(DataError, match="no text in .*.jsonl"):
        read(tmp_path)
    with pytest.raises(DataError, match="stdin"):
        read("-")


def test_a_fraction_is_the_beginning_of_large_files_and_some_of_many_small_ones(tmp_path, text):
    content = text(100_000)
    large, rows = write(tmp_path / "a.txt", content), [json.dumps({"text": f"row {i}"}) for i in range(40_000)]
    lines = write(tmp_path / "a.jsonl", "\n".join(rows))
    packed = write(tmp_path / "b.jsonl.gz", gzip.compress("\n".join(rows).encode()))
    [(_, first, _)] = read(large, fraction=0.25)
    size = len(content.encode())
    assert content.startswith(first) and len(first.encode()) == pytest.approx(size / 4, abs=2 * READ_BYTES)
    for path in (lines, packed):
        read_rows = read(path, fraction=0.25)
        assert read_rows == read(path)[: len(read_rows)] and 8_000 < len(read_rows) < 25_000
    for i in range(100):
        write(tmp_path / f"small/{i:03}.txt", "x" * 1000)
    counted = []
    found = read(tmp_path / "small", fraction=0.25, advance=counted.append)
    assert len(found) == 25 and sum(counted) == 25_000 and len(read(tmp_path / "small")) == 100


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
