"""The result file of JSONL requests: whole after a crash, continued by a later run."""

import errno
import json
import os
import stat

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mlxlm.generation.jsonl_results import ResultFile
from mlxlm.utils.errors import GenerationError
from mlxlm.utils.json_files import json_line


def line(id, sample=None, **fields):
    head = ({"id": id} if sample is None else {"id": id, "sample": sample}) | {"request": "012"}
    return json_line(head | (fields or {"text": f"of {id}"}))


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out.jsonl"


def test_folders_are_made(tmp_path):
    out = tmp_path / "a" / "b" / "out.jsonl"
    opened(out, line("a"))
    assert out.read_bytes() == line("a")


def opened(out, *lines):
    """Open the file and append lines; return the results that it had."""
    with ResultFile(out) as file:
        for one in lines:
            file.write(one)
        return {(id, sample) for id in ("a", "b", "1", 1) for sample in range(3) if file.done(id, sample) == "012"}


@given(st.text(st.characters()))
@example("\u202e\u2066\ud800\x7f")
def test_a_result_is_one_line(text):
    content = json_line({"text": text})
    assert json.loads(content) == {"text": text}
    assert len(content.decode().splitlines()) == 1 and content.endswith(b"\n")
    obeyed = (*range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A))
    assert not set(content.decode()) & set(map(chr, obeyed))


FAILED = line("b", error="no") + line("d", text="{", constraint_error="cut off")
CONTINUED = {  # content of a file, its results, and what of it stays when a line is appended
    "new": (b"", set(), b""),
    "whole": (line("a"), {("a", 0)}, line("a")),
    "samples": (line("a", 0) + line("a", 2) + line(1), {("a", 0), ("a", 2), ("1", 0), (1, 0)}, None),
    "failed": (line("a") + FAILED, {("a", 0)}, line("a")),
    "zeros": (line("a") + b"\0" * 3, {("a", 0)}, line("a")),
    "torn, zeros": (line("a") + line("b")[:-5] + b"\0" * 900, {("a", 0)}, line("a")),
    "no line end": (line("a") + line("b")[:-1], {("a", 0), ("b", 0)}, line("a") + line("b")),
    "failed and torn": (FAILED + line("b") + line("c", 1)[:9], {("b", 0)}, line("b")),
    **{
        f"torn at {cut}": (line("a") + line("b")[:cut], {("a", 0)}, line("a"))
        for cut in range(1, len(line("b")) - 1, 5)
    },
}


@pytest.mark.parametrize("name", CONTINUED)
def test_a_file_is_continued(out, name):
    before, done, kept = CONTINUED[name]
    if before:
        out.write_bytes(before)
        out.chmod(0o640)
    assert opened(out, line("c")) == done
    assert out.read_bytes() == (before if kept is None else kept) + line("c")
    assert not before or stat.S_IMODE(out.stat().st_mode) == 0o640


def test_an_unwritten_new_file_is_removed(out, tmp_path):
    assert opened(out) == set()
    assert list(tmp_path.iterdir()) == []
    out.touch()
    assert opened(out) == set()
    assert out.exists()


def test_opening_changes_nothing(out):
    before = line("a") + line("b", error="no") + line("c")[:-9]
    out.write_bytes(before)
    assert opened(out) == {("a", 0)}
    assert out.read_bytes() == before


@pytest.mark.parametrize(
    "content",
    [b"a shopping list", b"a shopping list\n", b'{"prompt": "x"}\n', b'{"id": 1, "prompt": "x"}\n', b"\n", b"[]\n",
     b"\x00\x00\n", line("a")[:-3] + b"\n" + line("b"), b'{"x', b'{"id": 1, "text": "x"}\n',
     b'{"id": 1, "request": 3, "text": "x"}\n', b'{"id": 1, "request": "0", "text": "x", "sample": []}\n'],
)  # fmt: skip
def test_other_files_are_refused(out, content):
    out.write_bytes(line("a") + content)
    with pytest.raises(GenerationError, match="line 2 of .* is not a result, and the file stays as it is"):
        ResultFile(out)
    assert out.read_bytes() == line("a") + content


def test_symbolic_links_stay(out, tmp_path):
    (tmp_path / "real").write_bytes(line("a", error="no") + line("b"))
    out.symlink_to(tmp_path / "real")
    opened(out, line("a"))
    assert out.is_symlink() and (tmp_path / "real").read_bytes() == line("b") + line("a")


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_no_regular_file(out, make):
    make(out)
    with pytest.raises(GenerationError, match="not a regular file|Is a directory"):
        ResultFile(out)
    assert out.exists()


def test_one_process_at_a_time(out):
    with ResultFile(out) as file:
        file.write(line("a"))
        with pytest.raises(GenerationError, match="another process is writing"):
            ResultFile(out)
    assert opened(out) == {("a", 0)}


def test_one_process_at_a_time_after_a_rewrite(out):
    out.write_bytes(line("a", error="no"))
    with ResultFile(out), pytest.raises(GenerationError, match="another process is writing"):
        ResultFile(out)


def test_a_full_disk_leaves_whole_lines(out, monkeypatch):
    real, room = os.write, len(line("a")) + 5

    def write(descriptor, data):
        nonlocal room
        if room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = real(descriptor, bytes(data)[:room])
        room -= written
        return written

    with ResultFile(out) as file:
        monkeypatch.setattr(os, "write", write)
        file.write(line("a"))
        with pytest.raises(GenerationError, match=r"cannot write .*: No space left on device \(try: free some disk"):
            file.write(line("b"))
    assert out.read_bytes() == line("a")


def test_an_interrupt_between_two_parts_of_a_line_leaves_whole_lines(out, monkeypatch):
    real, parts = os.write, []

    def write(descriptor, data):
        if parts:
            raise KeyboardInterrupt
        parts.append(real(descriptor, bytes(data)[:7]))
        return 7

    with ResultFile(out) as file:
        file.write(line("a"))
        monkeypatch.setattr(os, "write", write)
        with pytest.raises(KeyboardInterrupt):
            file.write(line("b"))
        monkeypatch.undo()
        file.write(line("c"))
    assert out.read_bytes() == line("a") + line("c")


def test_lines_are_not_buffered(out):
    """Nothing is buffered in the process: one that is killed loses at most the line that it is writing."""
    with ResultFile(out) as file:
        for n in range(3):
            file.write(line(n))
            assert out.read_bytes() == b"".join(map(line, range(n + 1)))
