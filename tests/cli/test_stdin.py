"""Piped input of commands that have a prompt."""

import io
import os
import sys

import pytest

from mlxlm.cli import stdin
from mlxlm.utils.errors import GenerationError


@pytest.fixture
def standard_input(monkeypatch):
    """`standard_input(descriptor)` makes it that of this process until the test ends."""
    before = os.dup(0)

    def replace(descriptor):
        os.dup2(descriptor, 0)
        os.close(descriptor)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.FileIO(0, closefd=False)))

    yield replace
    os.dup2(before, 0)
    os.close(before)


def pipe(content):
    reading, writing = os.pipe()
    os.write(writing, content)
    os.close(writing)
    return reading


def file(content, tmp_path):
    (tmp_path / "piped").write_bytes(content)
    return os.open(tmp_path / "piped", os.O_RDONLY)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"Some notes.\n", "Some notes.\n\nSummarize"),
        (b"\xef\xbb\xbf\n  indented\r\n", "\n  indented\n\nSummarize"),
        (b"\n", "Summarize"),
        (b"", "Summarize"),
    ],
)
def test_piped_input_comes_before_the_prompt(standard_input, tmp_path, capsys, content, expected):
    for source in (pipe(content), file(content, tmp_path)):
        standard_input(source)
        assert stdin.prepend_stdin("Summarize") == expected
    standard_input(pipe(content))
    assert stdin.prepend_stdin("") == expected.removesuffix("Summarize").removesuffix("\n\n")
    assert capsys.readouterr() == ("", "")


def test_terminals_and_devices_are_not_read(standard_input):
    other, terminal = os.openpty()
    os.write(other, b"typed\n\x04")
    for source in (terminal, os.open(os.devnull, os.O_RDONLY), os.open("/dev/zero", os.O_RDONLY)):
        standard_input(source)
        assert stdin.prepend_stdin("Summarize") == "Summarize"
    os.close(other)


def test_an_idle_pipe_is_ignored(standard_input, monkeypatch, capsys):
    reading, writing = os.pipe()
    standard_input(reading)
    monkeypatch.setattr(stdin, "FIRST_BYTE_SECONDS", 0)
    assert stdin.prepend_stdin("Summarize") == "Summarize"
    assert "warning: nothing came from standard input" in capsys.readouterr().err
    os.close(writing)


def test_piped_input_must_be_utf8(standard_input):
    standard_input(pipe(b"ab\xff"))
    with pytest.raises(GenerationError, match="standard input is not UTF-8"):
        stdin.prepend_stdin("Summarize")
