'''Messages of several lines, between """ and """.'''

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TextIO

from mlxlm.utils.bounded_reads import decode_utf8
from mlxlm.utils.errors import GenerationError

TRIPLE_QUOTE = '"""'
_COMMAND = re.compile(r"/(sy|ed)[a-z]*\s+")  # those that take a message: /system and /edit, also shortened


def has_open_block(text: str) -> bool:
    """Whether `text` begins a block that isn't closed yet, by itself or behind a command that takes one."""
    text = _COMMAND.sub("", text.strip(), count=1) if text.lstrip().startswith("/") else text.strip()
    return text.startswith(TRIPLE_QUOTE) and (len(text) < 2 * len(TRIPLE_QUOTE) or not text.endswith(TRIPLE_QUOTE))


def strip_block(text: str) -> str:
    """A message without the marks around a block, and without the line ends next to them."""
    stripped = text.strip()
    if not stripped.startswith(TRIPLE_QUOTE) or has_open_block(text):
        return text
    return stripped[len(TRIPLE_QUOTE) : -len(TRIPLE_QUOTE)].removeprefix("\n").removesuffix("\n")


def quote_message(message: str) -> str:
    """What a person types for it to be this message: one that looks like a command or a block is in a block."""
    marked = message.lstrip().startswith(("/", TRIPLE_QUOTE))
    return f"{TRIPLE_QUOTE}\n{message}\n{TRIPLE_QUOTE}" if marked else message


def read_piped_messages(source: TextIO | None) -> Iterator[str]:
    """The lines of a pipe, and its blocks as a whole. Raises GenerationError naming the line that can't be read."""
    held, begun = "", 0
    for number, line in enumerate(source.buffer if source else (), 1):
        name = f"line {number} of standard input"
        text = decode_utf8(line, name, GenerationError, "a text in UTF-8").rstrip("\r\n")
        held, begun = (f"{held}\n{text}", begun) if held else (text, number)
        if not has_open_block(held):
            yield held
            held = ""
    if held:
        raise GenerationError(f"the block that begins in line {begun} isn't closed", TRIPLE_QUOTE)
