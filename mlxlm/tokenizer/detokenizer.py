"""Token ids to text, one token at a time: never half a character, constant time per token."""

from __future__ import annotations

import codecs
from collections.abc import Callable


class StreamingDetokenizer:
    """What `Tokenizer.stream()` returns: `add_token` every id in order, then `finalize` once."""

    def add_token(self, token_id: int) -> str:
        """The complete characters that this token adds: "" while a character is still unfinished."""
        raise NotImplementedError

    def finalize(self) -> str:
        """What is left: an unfinished character comes out as U+FFFD."""
        raise NotImplementedError


class ByteDetokenizer(StreamingDetokenizer):
    """For tokenizers whose tokens stand for bytes (byte-level and byte fallback): a byte table and UTF-8.

    The pushes and the finish join to exactly `Tokenizer.decode(ids)`, for any ids. Bytes that are not UTF-8
    become U+FFFD by the "maximal subpart" practice (Unicode 15, section 3.9), as in Rust and Python.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], strip_first_space: bool):
        self._token_bytes = token_bytes
        self._strip = strip_first_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add_token(self, token_id: int) -> str:
        return self._strip_once(self._utf8.decode(self._token_bytes(token_id)))

    def finalize(self) -> str:
        return self._strip_once(self._utf8.decode(b"", final=True))

    def _strip_once(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer(StreamingDetokenizer):
    """For any other decoder (WordPiece, Unigram...): decodes a short window twice and emits the difference.

    The window starts at the tokens that were emitted last, so that a decoder which joins or cleans up
    neighbours sees one neighbour on the left. Not exact where a decoder looks further than that, or changes
    text which it has already produced.
    """

    # A character has at most four bytes: more unfinished tokens than that are invalid bytes, and shown.
    LONGEST_CHARACTER = 4

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._shown: list[int] = []
        self._pending: list[int] = []

    def add_token(self, token_id: int) -> str:
        self._pending.append(token_id)
        return self._emit(final=len(self._pending) > self.LONGEST_CHARACTER)

    def finalize(self) -> str:
        return self._emit(final=True) if self._pending else ""

    def _emit(self, final: bool) -> str:
        text = self._decode(self._shown + self._pending)
        if text.endswith("\ufffd") and not final:
            return ""
        new = text[len(self._decode(self._shown)) :] if self._shown else text
        if new:
            self._shown, self._pending = self._pending, []
        elif final:  # tokens without text (special ones) must not hide the left neighbour, nor pile up
            self._pending = self._pending[-1:]
        return new
