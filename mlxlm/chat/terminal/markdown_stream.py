"""Markdown on the screen as it grows: what is finished is printed once, only the last block is drawn again."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

from mlxlm.chat.terminal import markdown
from mlxlm.chat.terminal.live_lines import LiveLines, plain
from mlxlm.chat.terminal.output import printable

_FRAME = 1 / 30  # seconds between two drawings
_SHARE = 0.1  # of the time at most is spent on drawing: it is taken from the answer's


class MarkdownStream:
    """One text, pushed in pieces.

    Of a block that is higher than the screen the lines that can't change any more are printed early, so that
    nothing that has scrolled off would have to be drawn again. A table's columns change with each row: of one that
    is higher than the screen only the end is seen until it is finished.
    """

    def __init__(
        self, tail: LiveLines, size: Callable[[], tuple[int, int]], clock: Callable[[], float] = time.perf_counter
    ):
        """`size` tells the terminal's columns and rows; `clock` gives seconds."""
        self._live_lines, self._size, self._clock = tail, size, clock
        self._renderer = markdown.Renderer(size()[0])
        self._source = ""  # of the last block
        self._first = True  # it is the first one: no empty line above it
        self._cut = 0  # so many characters of it have their lines printed,
        self._above = 0  # which are so many lines
        self._number: int | None = None  # of its first item, where items above it are not part of it any more
        self._next_frame = 0.0

    def push(self, text: str) -> None:
        """More of the text: drawn now, or with a later piece."""
        self._source += printable(text.replace("\r", ""))
        begin = self._clock()
        if begin >= self._next_frame:
            self._draw()
            end = self._clock()
            self._next_frame = end + max(_FRAME, (end - begin) / _SHARE)

    def finish(self) -> None:
        """The text is complete: print it to its end. The cursor is then at the begin of a line."""
        final = self._blocks_before(None)
        self._live_lines.draw(final, keep=len(final))

    def _draw(self) -> None:
        columns, rows = self._size()
        if columns != self._renderer.columns:
            self._renderer = markdown.Renderer(columns)
            self._above = self._settled(self._lines(self._source), self._cut)
        # A line that isn't complete may still turn out to belong to the block above it.
        complete = self._source[: self._source.rfind("\n") + 1]
        final = self._blocks_before(max(markdown.block_starts(complete), default=0))
        lines = self._lines(markdown.close_open_markup(self._source))
        height = max(rows - 1, 1)
        if len(lines) - self._above > height:
            final += self._lines_that_stay(lines)
        self._live_lines.draw(final + lines[self._above :][-height:], keep=len(final))
        if final:
            self._shorten(lines)

    def _lines(self, block: str) -> list[str]:
        """The lines of the last block if `block` were its source."""
        lines = self._renderer.lines(block, self._number)
        return lines if self._first or not lines else ["", *lines]

    def _blocks_before(self, line: int | None) -> list[str]:
        """The lines of the blocks above a line of the source (None: of all), which are finished and leave it."""
        source_lines = re.split(r"(?<=\n)", self._source)
        starts = [start for start in markdown.block_starts(self._source) if line is None or start < line]
        if not starts:
            return []
        final: list[str] = []
        for start, end in zip(starts, [*starts[1:], line], strict=True):
            final += self._lines("".join(source_lines[start:end]))[self._above :]
            self._first, self._cut, self._above, self._number = False, 0, 0, None
        self._source = "" if line is None else "".join(source_lines[line:])
        return final

    def _lines_that_stay(self, lines: list[str]) -> list[str]:
        """Those of `lines`, the last block's, that its next lines can't change; from now on they are printed."""
        cut = self._source.rfind("\n", 0, len(self._source.rstrip("\n")))
        if cut <= self._cut or markdown.has_table(self._source) or markdown.is_open(self._source[:cut]):
            return []
        above = self._settled(lines, cut)
        stay = lines[self._above : above]
        self._cut, self._above = cut, max(above, self._above)
        return stay

    def _shorten(self, lines: list[str]) -> None:
        """Let go of the source of lines that are printed, so that a frame costs no more the longer a block becomes.
        Only where that can't be seen: what is still drawn stays the same but for colours, which code may lose that is
        inside of a text of several lines."""
        shorter = markdown.trim_beginning(self._source, self._cut, self._number) if self._cut else None
        if shorter is None:
            return
        before = self._source, self._cut, self._number
        self._source, self._cut, self._number = shorter
        new = self._lines(markdown.close_open_markup(self._source))
        above = len(new) - len(lines) + self._above
        if above >= 0 and plain(new[above:]) == plain(lines[self._above :]):
            self._above = above
        else:
            self._source, self._cut, self._number = before

    def _settled(self, lines: list[str], cut: int) -> int:
        """How many of `lines`, the last block's, are there already without what follows its character `cut`."""
        before = self._lines(self._source[:cut])
        return next((i for i, (a, b) in enumerate(zip(before, lines, strict=False)) if a != b), len(before))
