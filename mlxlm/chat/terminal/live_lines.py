"""The last lines of a terminal, which may still change; all above them is left alone."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rich.cells import cell_len

_STYLES = re.compile(r"\x1b\[[0-9;]*m")
# All of a change in one write. Terminals that know synchronized updates (2026) show it at once, others ignore the
# mode. Without autowrap (7) a character that is wider here than rich believes can't shift the rows below it.
_BEGIN, _END = "\x1b[?2026h\x1b[?7l", "\x1b[?7h\x1b[?2026l"


class LiveLines:
    """Lines at the cursor that can be drawn anew: only those that changed are written.

    A line is a string with colours (SGR sequences) and no other control characters, at most as wide as the
    terminal. The cursor stands behind the last line of the tail, or at the begin of a line when it has none.
    """

    def __init__(self, write: Callable[[str], None], size: Callable[[], tuple[int, int]]):
        """`write` puts a string out at once; `size` tells the terminal's columns and rows."""
        self._write, self._size = write, size
        self._lines: list[str] = []
        self._columns = 0

    def draw(self, lines: Sequence[str], keep: int = 0) -> None:
        """Show `lines` instead of those of the tail. The first `keep` of them are final and leave the tail.

        What doesn't fit on the screen scrolls off, and is then as good as kept: a tail should be lower than it.
        """
        columns, rows = self._size()
        moved = self._erased(columns, rows) if columns != self._columns else ""
        out = moved + self._changes(list(lines), columns, rows)
        self._lines, self._columns = list(lines), columns
        if keep:
            self._lines = self._lines[keep:]
            if not self._lines:
                out += "\r\n"
        if out:
            self._write(_BEGIN + out + _END)

    def _erased(self, columns: int, rows: int) -> str:
        """Go to the begin of the tail in a window that became wider or narrower, and erase from there.

        Terminals wrap lines that became too long; so many rows more there are to go up.
        """
        wrapped = sum(max(1, -(-_width(line) // columns)) for line in self._lines)
        up = min(wrapped, rows) - 1
        self._lines = []
        return ("\r" + (f"\x1b[{up}A" if up > 0 else "") + "\x1b[J") if wrapped else ""

    def _changes(self, lines: list[str], columns: int, rows: int) -> str:
        """What turns the tail on the screen into `lines`."""
        old = self._lines
        if lines == old:
            return ""
        at = len(old) - 1  # the cursor's line, or -1
        first = next((i for i, (a, b) in enumerate(zip(old, lines, strict=False)) if a != b), min(len(old), len(lines)))
        if first == at and len(lines) >= len(old) and lines[at].startswith(old[at]):
            return "\r\n".join([lines[at][len(old[at]) :], *(_ended(line, columns) for line in lines[at + 1 :])])
        first = max(min(first, len(lines) - 1), at - (rows - 1), 0)  # what scrolled off can't be reached
        if at < 0:
            move = ""
        elif first > at:
            move = "\r\n"
        else:
            move = "\r" + (f"\x1b[{at - first}A" if at > first else "")
        written = "\r\n".join(_ended(line, columns) for line in lines[first:])
        if len(old) > len(lines):  # erase the rows below, and come back
            back = f"\x1b[A\r\x1b[{_width(lines[-1])}C" if lines and lines[-1] else "\x1b[A\r"
            written += f"\r\n\x1b[J{back}" if lines else "\x1b[J"
        return move + written


def plain(lines: Sequence[str]) -> list[str]:
    """The text of lines without its colours."""
    return [_STYLES.sub("", line) for line in lines]


def _width(line: str) -> int:
    """Columns of a line, its colours aside."""
    return cell_len(_STYLES.sub("", line))


def _ended(line: str, columns: int) -> str:
    """`line`, and the rest of its row erased: of a full row, that would be its last character."""
    return line if _width(line) >= columns else line + "\x1b[K"
