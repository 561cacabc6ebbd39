"""Printing tables and long lines."""

import pytest


def test_a_broken_pipe_while_printing_a_table(monkeypatch):
    from mlxlm.cli import render

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
    from mlxlm.cli import render

    assert render.hanging_indent("attention ", "word " * 30) == "attention " + "word " * 30
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "50")
    lines = render.hanging_indent("attention      ", "key-value " * 9).splitlines()
    assert len(lines) > 1 and all(len(line) <= 50 for line in lines)
    assert all(line.startswith(" " * 15 + "key-value") for line in lines[1:])
