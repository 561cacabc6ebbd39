"""Reading lines with a timeout."""

import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxlm.cli.line_reader import LineReader


@pytest.fixture
def pipe():
    """(lines of a pipe, its writing end as a function; None closes it)."""
    reading, writing = os.pipe()

    def write(data):
        if data is None:
            os.close(writing)
        else:
            os.write(writing, data)

    yield LineReader(reading, 100), write
    os.close(reading)


def test_only_lines_that_have_arrived(pipe):
    lines, write = pipe
    assert lines.read_line(0) is None and not lines.ended
    write(b"one\ntwo\nth")
    assert [lines.read_line(0), lines.read_line(0), lines.read_line(0)] == [(1, b"one"), (2, b"two"), None]
    write(b"ree")
    assert lines.read_line(0) is None and not lines.ended
    write(b"\n\nlast")
    assert [lines.read_line(None), lines.read_line(None), lines.read_line(0)] == [(3, b"three"), (4, b""), None]
    write(None)
    assert lines.read_line(None) == (5, b"last")
    assert lines.read_line(None) is None and lines.ended


def test_the_timeout(pipe):
    lines, write = pipe
    start = time.monotonic()
    assert lines.read_line(0.05) is None
    assert time.monotonic() - start >= 0.05
    threading.Timer(0.05, write, [b"late\n"]).start()
    assert lines.read_line(None) == (1, b"late")
    write(None)


def test_a_long_line_is_cut(pipe):
    lines, write = pipe
    for _ in range(50):
        write(b"x" * 50)
        assert lines.read_line(0) is None
    write(b"x\nnext\n")
    assert lines.read_line(0) == (1, b"x" * 101)
    assert lines.read_line(0) == (2, b"next")
    write(None)


@given(st.binary(max_size=300), st.integers(1, 7))
def test_all_lines_of_any_file(tmp_path_factory, content, longest):
    path = tmp_path_factory.mktemp("lines") / "file"
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDONLY)
    lines = LineReader(descriptor, longest)
    found = []
    while (taken := lines.read_line(0)) is not None:
        found.append(taken)
    os.close(descriptor)
    wanted = content.split(b"\n")
    wanted = wanted if wanted[-1] else wanted[:-1]
    assert lines.ended and found == [(n, line[: longest + 1]) for n, line in enumerate(wanted, 1)]
