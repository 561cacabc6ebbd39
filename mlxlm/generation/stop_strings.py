"""Stop strings: text that ends an answer and isn't part of it."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Cuts a streamed text at the stop string that is completed first, however the text is split up.

    What `push` and `flush` return joins to the text before the cut. Text that could be the beginning of a
    stop string is held back until it is decided. Where two stop strings are completed by the same
    character, the longer one is cut off.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = stops
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Add text; return what is certain not to belong to a stop string. After `matched` is set: ""."""
        if self.matched:
            return ""
        self._held += text
        starts = [(self._held.find(stop), len(stop)) for stop in self._stops]
        cuts = [(start + length, start) for start, length in starts if start >= 0]
        if cuts:
            self.matched = True
            _, certain = min(cuts)
        else:
            certain = len(self._held) - self._undecided()
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def flush(self) -> str:
        """What was held back, once no more text comes. After `matched` is set: ""."""
        text, self._held = self._held, ""
        return "" if self.matched else text

    def _undecided(self) -> int:
        """The length of the longest end of the held text that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if self._held.endswith(tuple(stop[:length] for stop in self._stops if length < len(stop))):
                return length
        return 0
