"""Stop strings, which end a text however its tokens split them."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a streamed text at the stop string that is completed first, however the text is split into chunks.

    The returned pieces join to the text before the cut. Text that could begin a stop string is buffered until that is
    decided. If one character completes two stop strings, the longer one is cut off.

    Attributes:
        matched: Whether a stop string was completed.
    """

    def __init__(self, stop: Sequence[str]):
        self._stop = stop
        self._buffer = ""
        self.matched = False

    def push(self, text: str, may_end: bool = True) -> str:
        """Add text, which can complete a stop string if it `may_end` the whole.

        Returns:
            The text that can't belong to a stop string; "" once `matched`.
        """
        if self.matched:
            return ""
        before, self._buffer = len(self._buffer), self._buffer + text
        # What the buffer had before can only be the beginning.
        starts = [
            (self._buffer.find(stop, max(0, before - len(stop) + 1)), len(stop)) for stop in self._stop if may_end
        ]
        cuts = [(start + length, start) for start, length in starts if start >= 0]
        if cuts:
            self.matched = True
            _, decided = min(cuts)
        else:
            decided = len(self._buffer) - self._undecided_length()
        text, self._buffer = self._buffer[:decided], self._buffer[decided:]
        return text

    def flush(self) -> str:
        """Return the buffered text at the end of the text; "" once `matched`."""
        text, self._buffer = self._buffer, ""
        return "" if self.matched else text

    def _undecided_length(self) -> int:
        """The length of the longest suffix of the buffer that begins a stop string."""
        longest = max((len(stop) for stop in self._stop), default=1) - 1
        for length in range(min(longest, len(self._buffer)), 0, -1):
            if self._buffer.endswith(tuple(stop[:length] for stop in self._stop if length < len(stop))):
                return length
        return 0
