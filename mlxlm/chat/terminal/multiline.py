"""Messages of several lines, between triple quotes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TextIO

from mlxlm.utils.bounded_reads import decode_utf8
from mlxlm.utils.errors import GenerationError

TRIPLE_QUOTE = '"""'
_TAKES_TEXT = re.compile(r"/(sy|ed|con)[a-z]*\s+")  # /system, /edit and /continue, which take a text, and abbreviations


def has_open_block(text: str) -> bool:
    """Whether `text`, or the argument of a command that takes a message, starts a block that is still open."""
    text = _TAKES_TEXT.sub("", text.strip(), count=1) if text.lstrip().startswith("/") else text.strip()
    return text.startswith(TRIPLE_QUOTE) and (len(text) < 2 * len(TRIPLE_QUOTE) or not text.endswith(TRIPLE_QUOTE))


def strip_block(text: str) -> str:
    """Return a message without the quotes around a block and the line ends next to them."""
    stripped = text.strip()
    if not stripped.startswith(TRIPLE_QUOTE) or has_open_block(text):
        return text
    return stripped[len(TRIPLE_QUOTE) : -len(TRIPLE_QUOTE)].removeprefix("\n").removesuffix("\n")


def quote_message(message: str) -> str:
    """Return `message` as it must be typed: in a block, if it looks like a command or a block."""
    needs_quotes = message.lstrip().startswith(("/", TRIPLE_QUOTE))
    return f"{TRIPLE_QUOTE}\n{message}\n{TRIPLE_QUOTE}" if needs_quotes else message


def read_piped_messages(source: TextIO | None) -> Iterator[str]:
    """Yield the lines of a pipe, and each block as one message. Raise GenerationError for a line that isn't UTF-8."""
    message, first_line = "", 0
    for number, line in enumerate(source.buffer if source else (), 1):
        name = f"line {number} of standard input"
        text = decode_utf8(line, name, GenerationError, "a text in UTF-8").rstrip("\r\n")
        message, first_line = (f"{message}\n{text}", first_line) if message else (text, number)
        if not has_open_block(message):
            yield message
            message = ""
    if message:
        raise GenerationError(f"the block that starts in line {first_line} isn't closed", TRIPLE_QUOTE)
