"""The last lines of a terminal, redrawn in place while they change."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from rich.cells import cell_len

_SGR = re.compile(r"\x1b\[[0-9;]*m")
# One write per frame. Terminals with synchronized updates (mode 2026) show it at once, others ignore the mode. Without
# autowrap (mode 7) a character that the terminal draws wider than rich expects can't shift the rows below it.
_BEGIN, _END = "\x1b[?2026h\x1b[?7l", "\x1b[?7h\x1b[?2026l"


class LiveTail:
    """Lines at the cursor that can be redrawn; everything above them stays.

    A line has SGR sequences, no other control characters, and at most the terminal's width. The cursor is behind the
    last line of the tail, or at the start of a line if there is none.
    """

    def __init__(self, write: Callable[[str], None], size: Callable[[], tuple[int, int]]):
        """`write` writes and flushes a string; `size` returns the terminal's columns and rows."""
        self._write, self.size = write, size
        self._lines: list[str] = []

    def draw(self, lines: Sequence[str], final: Sequence[str] = ()) -> None:
        """Print `final` in place of the tail, then draw `lines` below it as the new tail."""
        lines, final = list(lines), list(final)
        if lines == self._lines and not final:
            return
        columns, rows = self.size()
        # After a resize, terminals wrap lines that have become too long.
        drawn = [max(1, -(-cell_len(_SGR.sub("", line)) // max(columns, 1))) for line in self._lines]
        old, new = self._lines, final + lines
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
        if old and same == len(old):  # only add lines
            out = "\r\n" if len(new) > same else ""
        elif old:
            same = max(0, min(same, len(new) - 1))
            up = min(sum(drawn[same:]), rows) - 1
            out = "\r" + (f"\x1b[{up}A" if up > 0 else "") + "\x1b[J"
        else:
            out = ""
        out += "\r\n".join(new[same:]) + ("\r\n" if final and not lines else "")
        self._lines = lines
        self._write(_BEGIN + out + _END)
