"""Tokens as bytes, for byte-level tokenizers and those with byte fallback."""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class ByteDecoder:
    """A decoder whose tokens stand for bytes whatever their neighbours: byte-level, or byte fallback."""

    def __init__(self, byte_level: bool, replacements: list[tuple[str, str]], strip_first_space: bool):
        self.byte_level = byte_level
        self.replacements = replacements
        self.strip_first_space = strip_first_space

    @classmethod
    def of(cls, runtime: tokenizers.Tokenizer) -> ByteDecoder | None:
        """Recognise `runtime`'s decoder; None if it is of another sort."""
        if runtime.decoder is None:
            return None
        spec = json.loads(runtime.decoder.__getstate__())
        steps = spec["decoders"] if spec["type"] == "Sequence" else [spec]
        if [step["type"] for step in steps] == ["ByteLevel"]:
            return cls(True, [], False)
        replacements = []
        kinds = []
        for step in steps:
            kinds.append(step["type"])
            if step["type"] == "Replace" and "String" in step["pattern"] and "ByteFallback" not in kinds:
                kinds.pop()
                replacements.append((step["pattern"]["String"], step["content"]))
        if kinds == ["ByteFallback", "Fuse"]:
            return cls(False, replacements, False)
        if kinds == ["ByteFallback", "Fuse", "Strip"] and _strips_one_space(steps[-1]):
            return cls(False, replacements, True)
        return None

    def bytes_of(self, token: str) -> bytes:
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
    """GPT-2's table (`bytes_to_unicode` in its encoder.py): printable Latin-1 stands for itself, the other 68
    bytes, in order, for the characters from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
