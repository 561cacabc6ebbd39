"""The bytes of single tokens, for byte-level BPE and BPE with byte fallback."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

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
        strips = types == ["ByteFallback", "Fuse", "Strip"] and _strips_one_space(steps[-1])
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


def _strips_one_space(step: dict[str, Any]) -> bool:
    return (step["content"], step["start"], step["stop"]) == (" ", 1, 0)


def _byte_of_character() -> dict[str, int]:
    """GPT-2's table (`bytes_to_unicode` in its encoder.py): printable Latin-1, and U+0100 on for the other 68 bytes."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = sorted({*range(256)} - printable)
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
