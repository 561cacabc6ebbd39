"""Streaming detokenizers: token ids to text, one token at a time, in constant time and without partial characters.

With byte-level BPE, and with BPE with byte fallback, each token has its bytes, whatever is around it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class ByteDecoder:
    """The decoder of a tokenizer whose tokens have the same bytes in any context.

    Attributes:
        byte_level: Byte-level BPE (GPT-2's character for each byte), else byte fallback ("<0x0A>").
        replacements: Substrings of tokens and their replacements, such as U+2581 and a space.
        strip_first_space: Decoding drops a space at the beginning of a text (Llama 2's dummy prefix).
    """

    byte_level: bool
    replacements: list[tuple[str, str]]
    strip_first_space: bool

    @classmethod
    def from_runtime(cls, runtime: tokenizers.Tokenizer) -> ByteDecoder | None:
        """Return the decoder of `runtime`, or None if it is of another type."""
        if runtime.decoder is None:
            return None
        spec = json.loads(runtime.decoder.__getstate__())
        steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
        if [step["type"] for step in steps] == ["ByteLevel"]:
            return cls(True, [], False)
        replacements, types = [], []
        for step in steps:
            types.append(step["type"])
            if step["type"] == "Replace" and "String" in step["pattern"] and "ByteFallback" not in types:
                types.pop()
                replacements.append((step["pattern"]["String"], step["content"]))
        strip = [steps[-1].get(name) for name in ("content", "start", "stop")]
        strips = types == ["ByteFallback", "Fuse", "Strip"] and strip == [" ", 1, 0]
        return cls(False, replacements, strips) if strips or types == ["ByteFallback", "Fuse"] else None

    def token_bytes(self, token: str) -> bytes:
        """The bytes of a token's spelling in the vocabulary."""
        if self.byte_level:
            try:
                return bytes(map(_BYTE_OF_CHARACTER.__getitem__, token))
            except KeyError:  # an added token, kept as plain text
                return token.encode("utf-8")
        for old, new in self.replacements:
            token = token.replace(old, new)
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match[1], 16)]) if match else token.encode("utf-8")


# GPT-2's table (`bytes_to_unicode` in its encoder.py): printable Latin-1, and U+0100 on for the other 68 bytes.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = enumerate(sorted({*range(256)} - _PRINTABLE), start=0x100)
_BYTE_OF_CHARACTER = {chr(byte): byte for byte in _PRINTABLE} | {chr(code): byte for code, byte in _OTHERS}
CHARACTER_OF_BYTE = {byte: character for character, byte in _BYTE_OF_CHARACTER.items()}


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
