"""Output of the chat: the model's text on standard output, everything else on standard error."""

from __future__ import annotations

import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable

from mlxlm.utils.formatting import printable

_FIRST_COLUMN = re.compile(r".*?\S {2,}")


def write(text: str) -> None:
    """Write text of a model to standard output and flush; in a terminal without control characters."""
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def print_status(text: str) -> None:
    """Print a status message on standard error, dimmed in a terminal."""
    print_info(text, dim)


def print_info(text: str, style: Callable[[str], str] = str) -> None:
    """Print requested information on standard error, in a terminal wrapped and in a style."""
    text = printable(text)
    if sys.stderr.isatty():
        text = style("\n".join(map(_wrapped, text.split("\n"))))
    print(text, file=sys.stderr, flush=True)


def _wrapped(line: str) -> str:
    """Wrap a line to the terminal's width. If it has a first column, the second is indented."""
    width = max(shutil.get_terminal_size().columns, 20)
    column = _FIRST_COLUMN.match(line)
    start = column.end() if column and column.end() < width // 2 else 0
    lines = textwrap.wrap(
        line[start:], width - start, break_on_hyphens=False, break_long_words=False, replace_whitespace=False
    )
    return line[:start] + ("\n" + " " * start).join(lines)


def dim(text: str) -> str:
    """Return `text` in the faint style, unless colors are disabled."""
    return text if colors_disabled() else f"\x1b[2m{text}\x1b[0m"


def colors_disabled() -> bool:
    """Whether to write no escape sequences: NO_COLOR is set, or the terminal is dumb."""
    return "NO_COLOR" in os.environ or is_dumb_terminal()


def is_dumb_terminal() -> bool:
    """Whether the terminal can't move its cursor."""
    return os.environ.get("TERM", "dumb") in ("", "dumb", "unknown")
