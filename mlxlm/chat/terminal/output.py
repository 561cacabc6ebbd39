"""What a chat writes: the text of a model on standard output, everything else on standard error."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap

from mlxlm.utils.errors import CONTROLS

_CONTROL_CHARACTERS = re.compile(f"[\\x00-\\x08\\x0b-\\x1f{CONTROLS}]")

_FIRST_COLUMN = re.compile(r".*?\S {2,}")


def printable(text: str) -> str:
    """`text` with every control character but tab and line end as U+FFFD: no answer may drive the terminal.

    Among them are those that turn the direction of what follows, and the line ends that only some terminals obey.
    """
    return _CONTROL_CHARACTERS.sub("\ufffd", text)


def write(text: str) -> None:
    """Text of a model to standard output, at once; in a terminal without control characters."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def print_status(text: str) -> None:
    """Lines for the person on standard error, dimmed in a terminal."""
    text = printable(text)
    print(dim(_wrapped(text)) if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def print_info(text: str) -> None:
    """Lines that a person asked for, on standard error."""
    text = printable(text)
    print(_wrapped(text) if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def _wrapped(text: str) -> str:
    """`text` in lines as wide as the terminal; behind a first column, they begin below each other."""
    width = max(shutil.get_terminal_size().columns, 20)
    return "\n".join(_wrapped_line(line, width) for line in text.split("\n"))


def _wrapped_line(line: str, width: int) -> str:
    column = _FIRST_COLUMN.match(line)
    indent = " " * column.end() if column and column.end() < width // 2 else ""
    return textwrap.fill(
        line, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False, replace_whitespace=False
    )


def dim(text: str) -> str:
    """`text` in a terminal's faint style; as it is for a terminal without styles, or a person who wants none."""
    return text if colors_disabled() else f"\x1b[2m{text}\x1b[0m"


def colors_disabled() -> bool:
    """Whether escape sequences are out of place: a dumb terminal, or NO_COLOR."""
    return "NO_COLOR" in os.environ or is_dumb_terminal()


def is_dumb_terminal() -> bool:
    """Whether the terminal can't move its cursor."""
    return os.environ.get("TERM", "dumb") in ("", "dumb", "unknown")
