"""Tables, long lines, and the spinner: in a terminal, after a delay."""

import subprocess
import sys

import pexpect
import pytest

from mlxlm.cli import render


def test_a_broken_pipe_while_printing_a_table(monkeypatch):
    class Gone:
        encoding = "utf-8"

        def isatty(self):
            return False

        def write(self, _text):
            raise BrokenPipeError

        flush = fileno = lambda self: 1

    monkeypatch.setattr("sys.stdout", Gone())
    with pytest.raises(BrokenPipeError):
        render.print_table([("a", 1)])


def test_long_lines_are_indented_in_a_terminal(monkeypatch):
    assert render.hanging_indent("attention ", "word " * 30) == "attention " + "word " * 30
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "50")
    lines = render.hanging_indent("attention      ", "key-value " * 9).splitlines()
    assert len(lines) > 1 and all(len(line) <= 50 for line in lines)
    assert all(line.startswith(" " * 15 + "key-value") for line in lines[1:])


SCRIPT = """
from mlxlm.cli import render
render._DELAY = {delay}
with render.spinner("loading [x]") as update:
    {wait}
    update("reading")
    {wait}
print("done")
"""


def test_a_long_wait_shows_its_label():
    script = SCRIPT.format(delay=0.1, wait="input()")
    child = pexpect.spawn(sys.executable, ["-c", script], encoding="utf-8", timeout=60, echo=False)
    child.expect_exact("loading [x]")
    child.sendline()
    child.expect_exact("reading")
    child.sendline()
    child.expect("\x1b\\[2K.*done")  # the line is cleared before other output
    child.expect(pexpect.EOF)


def test_a_short_wait_shows_nothing():
    script = SCRIPT.format(delay=100, wait="pass")
    child = pexpect.spawn(sys.executable, ["-c", script], encoding="utf-8", timeout=60)
    child.expect(pexpect.EOF)
    assert child.before == "done\r\n"


def test_nothing_without_a_terminal():
    script = SCRIPT.format(delay=0, wait="input()")
    done = subprocess.run([sys.executable, "-c", script], input=b"\n\n", capture_output=True, timeout=60)
    assert (done.stdout, done.stderr) == (b"done\n", b"")
