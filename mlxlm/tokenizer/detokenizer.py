"""Streaming detokenizers: token ids to text, one token at a time, in constant time and without partial characters."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Protocol


class StreamingDetokenizer(Protocol):
    """The interface that `Tokenizer.detokenizer()` returns: `add_token` for each id in order, then `finalize`."""

    def add_token(self, token_id: int) -> str:
        """Return the text that a token completes, "" within a multi-byte character."""

    def finalize(self) -> str:
        """Return the remaining text; an incomplete character is U+FFFD."""


class ByteDetokenizer:
    """For tokenizers whose tokens have fixed bytes (byte-level and byte fallback).

    The parts join to exactly `Tokenizer.decode(ids)`, for any ids. Invalid UTF-8 becomes U+FFFD by the "maximal
    subpart" practice (Unicode 15, section 3.9), as in Rust and Python.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], strip_first_space: bool):
        self._token_bytes = token_bytes
        self._strip = strip_first_space
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add_token(self, token_id: int) -> str:
        """See `StreamingDetokenizer`."""
        return self._strip_once(self._utf8.decode(self._token_bytes(token_id)))

    def finalize(self) -> str:
        """See `StreamingDetokenizer`."""
        return self._strip_once(self._utf8.decode(b"", final=True))

    def _strip_once(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """For any other decoder (WordPiece, Unigram): decodes a short window twice and emits the difference.

    The window starts at the previously emitted tokens, so that a decoder that joins or cleans up neighboring tokens
    sees the left neighbor. It isn't exact if a decoder looks further back or changes earlier text.
    """

    # A character has at most four bytes: more incomplete tokens than that are invalid bytes, and are emitted.
    MAX_CHARACTER_BYTES = 4

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self._emitted: list[int] = []
        self._pending: list[int] = []

    def add_token(self, token_id: int) -> str:
        """See `StreamingDetokenizer`."""
        self._pending.append(token_id)
        return self._emit(final=len(self._pending) > self.MAX_CHARACTER_BYTES)

    def finalize(self) -> str:
        """See `StreamingDetokenizer`."""
        return self._emit(final=True) if self._pending else ""

    def _emit(self, final: bool) -> str:
        text = self._decode(self._emitted + self._pending)
        if text.endswith("\ufffd") and not final:
            return ""
        new = text[len(self._decode(self._emitted)) :] if self._emitted else text
        if new:
            self._emitted, self._pending = self._pending, []
        elif final:  # special tokens have no text: keep one
            self._pending = self._pending[-1:]
        return new
