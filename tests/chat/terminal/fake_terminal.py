"""A simulated terminal: the lines on its screen after a program has written to it."""

from __future__ import annotations

import re

from rich.cells import cell_len

_PIECE = re.compile(r"\x1b\[(\??[0-9;]*)([A-Za-z])|\r|\n|[^\x1b\r\n]")


class FakeTerminal:
    """A screen of `columns` x `rows` that scrolls, and obeys what `LiveTail` sends; anything else is an error.

    `scrolled` are the lines above it, which no program can change.
    """

    def __init__(self, columns: int, rows: int):
        self.columns, self.rows = columns, rows
        self.scrolled: list[str] = []
        self._screen: list[list[str]] = [[]]
        self._x = self._y = 0
        self._wraps = True

    @property
    def lines(self) -> list[str]:
        """All lines, scrolled ones included, without spaces at their ends and empty lines at the end."""
        found = self.scrolled + ["".join(row).rstrip() for row in self._screen]
        while found and not found[-1]:
            found.pop()
        return found

    def write(self, text: str) -> None:
        end = 0
        for match in _PIECE.finditer(text):
            assert match.start() == end, f"a control sequence at {text[end : match.start() + 9]!r}"
            end = match.end()
            if match[2]:
                self._obey(match[1], match[2])
            elif match[0] == "\r":
                self._x = 0
            elif match[0] == "\n":
                self._down()
            else:
                self._put(match[0])
        assert end == len(text)

    def resize(self, columns: int) -> None:
        """Another width: lines that are too long are wrapped. The cursor stays with its character."""
        assert self._y == len(self._screen) - 1, "nothing is below the cursor"
        self.columns = columns
        cells = [cell for row in self._screen for cell in _wrapped(row, columns)]
        self._screen = cells
        self._x = min(len(cells[-1]), columns - 1)
        while len(self._screen) > self.rows:
            self.scrolled.append("".join(self._screen.pop(0)).rstrip())
        self._y = len(self._screen) - 1

    def _down(self) -> None:
        self._y += 1
        if self._y == self.rows:
            self.scrolled.append("".join(self._screen.pop(0)).rstrip())
            self._y -= 1
        if self._y == len(self._screen):
            self._screen.append([])

    def _put(self, character: str) -> None:
        width = cell_len(character)
        if not width:
            return
        if self._x + width > self.columns:
            if self._wraps:
                self._x = 0
                self._down()
            else:
                self._x = self.columns - width
        row = self._screen[self._y]
        row += [" "] * (self._x + width - len(row))
        row[self._x : self._x + width] = [character] + [""] * (width - 1)
        self._x += width
        if not self._wraps:
            self._x = min(self._x, self.columns - 1)

    def _obey(self, argument: str, kind: str) -> None:
        count = int(argument) if argument.isdigit() else 1
        if kind in "hl":
            assert argument in ("?7", "?2026"), argument
            self._wraps = self._wraps if argument == "?2026" else kind == "h"
        elif kind == "A":
            self._y = max(0, self._y - count)
        elif kind == "C":
            self._x = min(self.columns - 1, self._x + count)
        elif kind in "KJ":
            del self._screen[self._y][self._x :]
            if kind == "J":
                del self._screen[self._y + 1 :]
        else:
            assert kind == "m", kind


def _wrapped(row: list[str], columns: int) -> list[list[str]]:
    while row and row[-1] == " ":
        row = row[:-1]
    parts: list[list[str]] = [[]]
    for i, cell in enumerate(row):
        if cell and len(parts[-1]) + (2 if i + 1 < len(row) and row[i + 1] == "" else 1) > columns:
            parts.append([])
        parts[-1].append(cell)
    return parts
