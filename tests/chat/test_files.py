"""Files as text in messages."""

import sys
from types import SimpleNamespace

import pytest

from mlxlm.chat.files import FileError, TextFile, name_files, read_file, split_files, with_files
from mlxlm.chat.terminal.mentions import mentioned_paths

HTML = """<!doctype html><html><head><title>Kites</title><style>p { color: red }</style></head>
<body><h1>About <b>kites</b></h1><p>Anna  has a\n blue&nbsp;kite.<script>alert("x < 1")</script></p>
<ul><li>one<li>two</ul><table><tr><td>a</td><td>b</td></tr><tr><td>c</td></tr></table><pre>x
   y</pre>"""


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.txt", "Grüße\r\n世界\n".encode(), "Grüße\n世界"),
        ("a.csv", b"\xef\xbb\xbfa,b\n1,2", "a,b\n1,2"),
        ("a.txt", "Grüße".encode("utf-16"), "Grüße"),
        ("a.svg", b"<svg/>", "<svg/>"),
        ("a.py", b"\n    x = 1\n", "    x = 1"),
        (
            "a.html",
            HTML.encode(),
            "Kites\n\n# About kites\n\nAnna has a blue kite.\n\n- one\n- two\n\na\tb\n\nc\n\nx\n   y",
        ),
    ],
)
def test_text_of_a_file(tmp_path, name, content, text):
    (tmp_path / name).write_bytes(content)
    assert read_file(tmp_path / name) == TextFile(name, text)


WITHOUT_TEXT = {
    ("a.png", b"\x89PNG\0"): "is an image",
    ("a.jpg", b"\xff\xd8"): "is an image",
    ("a.mp3", b"ID3\0"): "is a sound",
    ("a.docx", b"PK\x03\x04\0"): "is a binary file",
    ("a.txt", b"\xff\xfe\x00\xd8"): "is a binary file",
    ("a.csv", b"caf\xe9;"): r"is not UTF-8: .* \(try: .*iconv",
    ("a.txt", b""): "has no text$",
    ("a.html", b"<script>x</script>"): "has no text",
    ("a.pdf", b"%PDF-1.7"): "cannot read|needs pypdf",
}


@pytest.mark.parametrize("name, content", WITHOUT_TEXT)
def test_files_without_text(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FileError, match=WITHOUT_TEXT[name, content]):
        read_file(tmp_path / name)


def test_paths_that_are_not_files(tmp_path, monkeypatch):
    monkeypatch.setattr("mlxlm.chat.files.MAX_BYTES", 3)
    (tmp_path / "a").write_text("long")
    for path, problem in {
        tmp_path: "is a folder .try: one of its files: a.$",
        tmp_path / "x": "No such file",
        "/dev/zero": "not a regular file",
        tmp_path / "a": "has 4 B, the limit is 3 B",
    }.items():
        with pytest.raises(FileError, match=problem):
            read_file(path)


def test_text_of_a_pdf(tmp_path, monkeypatch):
    """With a stand-in for pypdf, which not every installation has."""
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.7")
    pages = [SimpleNamespace(extract_text=lambda text=text: text) for text in ("One\n", "\ud835\udc65 \ud800")]
    monkeypatch.setitem(sys.modules, "pypdf", SimpleNamespace(PdfReader=lambda file: SimpleNamespace(pages=pages)))
    assert read_file(tmp_path / "a.pdf").text == "One\n\n\U0001d465 \ufffd"
    monkeypatch.setitem(sys.modules, "pypdf", None)
    with pytest.raises(FileError, match=r"is a PDF, which needs pypdf \(try: pip install pypdf\)"):
        read_file(tmp_path / "a.pdf")


def test_files_are_found_in_a_message():
    files = [TextFile("a.md", "x\n```py\ny\n````\n"), TextFile("b c.txt", "File: a\n```\nz\n```\n\n")]
    for message in ("Why?", "", "File: x", "```\ncode\n```"):
        assert split_files(with_files(message, files)) == (files, message)
    assert with_files("Hi", []) == "Hi" and split_files("Hi") == ([], "Hi")
    assert name_files(with_files("Why?", files)) == "[a.md] [b c.txt] Why?"


def test_mentions(tmp_path, monkeypatch):
    for name in ("notes.txt", "my notes.txt", "who?", "it's"):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    def mentioned(text):
        shown, paths = mentioned_paths(text)
        return shown, [path.name for path in paths]

    assert mentioned("See @notes.txt, please") == ("See notes.txt, please", ["notes.txt"])
    assert mentioned("(@notes.txt)") == ("(@notes.txt)", [])  # a mention is a word of its own
    both = ["my notes.txt", "my notes.txt"]
    assert mentioned('@my\\ notes.txt and\n@"my notes.txt".') == ("my notes.txt and\nmy notes.txt.", both)
    assert mentioned("@~/notes.txt! @it\\'s") == ("notes.txt! it's", ["notes.txt", "it's"])
    assert mentioned("@who?") == ("who?", ["who?"])
    for text in ("@nobody", "me@notes.txt", "@", "@folder", '@"', "@" + "x" * 300, "@a\0b"):
        assert mentioned(text) == (text, [])
