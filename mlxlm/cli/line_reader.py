"""Lines as they arrive: from a file, or from a pipe that stays open while its writer waits for an answer."""

from __future__ import annotations

import os
import select

_BLOCK = 2**18  # bytes


class LineReader:
    """The lines of an open file, pipe or terminal, taken one by one and without a thread.

    Python's own readers wait until they have a whole block, or for ever: here the caller says how long.
    """

    def __init__(self, descriptor: int, longest: int):
        """A line of more than `longest` bytes is cut off to `longest + 1`, so that memory is bounded."""
        self._descriptor = descriptor
        self._longest = longest
        self._held = bytearray()
        self._searched = 0
        self._number = 0
        self.ended = False

    def read_line(self, seconds: float | None) -> tuple[int, bytes] | None:
        """The next line, as (its number from 1, its bytes without the line end).

        Waits up to `seconds` for it (None: as long as it takes). None if no line has come, or if none will:
        then `ended` is True. The last line needs no line end.
        """
        while (end := self._held.find(b"\n", self._searched)) < 0 and not self.ended:
            self._searched = len(self._held)
            if not select.select([self._descriptor], [], [], seconds)[0]:
                return None
            block = os.read(self._descriptor, _BLOCK)
            self.ended = not block
            self._hold(block)
        if end < 0 and not self._held:
            return None
        line = bytes(self._held if end < 0 else self._held[:end])
        del self._held[: len(line) + 1]
        self._searched = 0
        self._number += 1
        return self._number, line[: self._longest + 1]

    def _hold(self, block: bytes) -> None:
        """Add a block, where no line ends in what is held; of an endless line only the beginning."""
        if len(self._held) > self._longest:
            block = block[block.index(b"\n") :] if b"\n" in block else b""
        self._held += block
