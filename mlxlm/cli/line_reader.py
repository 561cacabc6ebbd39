"""Reads lines as they arrive, from a file or from a pipe whose writer waits for an answer."""

from __future__ import annotations

import os
import select

_BLOCK = 2**18  # bytes


class LineReader:
    """The lines of an open file, pipe or terminal, read one by one with a timeout and without a thread.

    Python's own readers block until they have a whole block of bytes.

    Args:
        descriptor: The file descriptor.
        max_bytes: A longer line is cut to `max_bytes + 1` bytes, so that memory is bounded.
    """

    def __init__(self, descriptor: int, max_bytes: int):
        self._descriptor = descriptor
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._searched = 0
        self._number = 0
        self.ended = False

    def read_line(self, seconds: float | None) -> tuple[int, bytes] | None:
        """Read the next line. The last one needs no line end.

        Args:
            seconds: How long to wait for it; None waits without a limit.

        Returns:
            (number from 1, bytes without the line end), or None if no line has come. At the end of the input `ended`
            is True.
        """
        while (end := self._buffer.find(b"\n", self._searched)) < 0 and not self.ended:
            self._searched = len(self._buffer)
            if not select.select([self._descriptor], [], [], seconds)[0]:
                return None
            block = os.read(self._descriptor, _BLOCK)
            self.ended = not block
            self._append(block)
        if end < 0 and not self._buffer:
            return None
        line = bytes(self._buffer if end < 0 else self._buffer[:end])
        del self._buffer[: len(line) + 1]
        self._searched = 0
        self._number += 1
        return self._number, line[: self._max_bytes + 1]

    def _append(self, block: bytes) -> None:
        """Add a block to the buffer, which has no line end; of a line that is too long keep only the beginning."""
        if len(self._buffer) > self._max_bytes:
            block = block[block.index(b"\n") :] if b"\n" in block else b""
        self._buffer += block
