"""Documents as streams of text pieces, decoded and split in bounded memory."""

from __future__ import annotations

import codecs
import io
import itertools
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import zstandard

from mlxlm.data.manifest import SkipReason
from mlxlm.data.options import BAD_INPUT_POLICIES
from mlxlm.utils.errors import DataError, os_errors_as

OnBad = Callable[[DataError], None]


_MAX_REASONS = 20  # kinds of errors that are counted separately


class BadInput:
    """Handles lines that are not UTF-8 or not JSON, rows without text, and malformed conversations.

    Files that can't be read at all (missing, empty, damaged, UTF-16) are errors with either policy.

    Args:
        policy: "stop" raises an error that names the line or row; "skip" leaves it out.

    Attributes:
        reasons: What was left out, by the kind of error.

    Raises:
        DataError: There is no such policy.
    """

    def __init__(self, policy: str = "stop"):
        if policy not in BAD_INPUT_POLICIES:
            raise DataError(f"on_bad_input is '{policy}'", " or ".join(BAD_INPUT_POLICIES))
        self._stop = policy == "stop"
        self.reasons: dict[str, SkipReason] = {}

    @property
    def skipped(self) -> int:
        """Number of lines and rows left out."""
        return sum(reason.count for reason in self.reasons.values())

    def __call__(self, error: DataError) -> None:
        """Skip the input that caused `error`, or raise the error with a hint at `on_bad_input`."""
        if self._stop:
            skip = "`on_bad_input=skip`"
            raise DataError(error.message, f"{error.hint}, or {skip}" if error.hint else skip) from error
        kind = re.sub(r"\d+", "0", re.sub(r"^.*?(line|row) \d+", "", error.message))
        if kind not in self.reasons and len(self.reasons) >= _MAX_REASONS:
            kind = "other"
        self.reasons.setdefault(kind, SkipReason(error.message)).count += 1


def raise_error(error: DataError) -> None:
    """Raise `error` as it is: the default for `on_bad`."""
    raise error


PIECE_CHARS = 1 << 14  # characters: small enough to bound memory, large enough for the tokenizer's threads
READ_BYTES = 1 << 16  # bytes

Advance = Callable[[int], None]


@dataclass
class Document:
    """A text, as a stream of pieces to read once and in order, or a conversation.

    Attributes:
        location: The file, with the line or row, for error messages.
        pieces: Text of about `PIECE_CHARS` characters each, split after a line end if possible. Empty for a
            conversation.
        messages: Of a conversation, in the fields of OpenAI's fine-tuning format; each has a "role", a "content" (text,
            also if it was null) and a "weight" (1, or 0 if the message is not to be learned). None for a text.
        tools: Of a conversation, the functions that the assistant can call, in OpenAI's form.
        format: Name of the record's format, see `mlxlm.data.record_formats`; "text" for a file of text.
        rejected: Of a preference, the conversation with the rejected answer; `messages` has the chosen one.
        label: Whether the answer is desirable, if that is known.
        add_bos: False if the document was cut at its start.
        add_eos: False if the document was cut at its end.
    """

    location: str
    pieces: Iterator[str]
    messages: list[dict[str, Any]] | None = None
    add_bos: bool = True
    add_eos: bool = True
    tools: list[Any] | None = None
    format: str = "text"
    rejected: list[dict[str, Any]] | None = None
    label: bool | None = None

    @property
    def contents(self) -> list[str]:
        """The texts of the messages; none if it is a text."""
        return [message["content"] for message in self.messages or ()]


Row = Callable[[], Document | None]  # reads a row: None if it has no text. Raises DataError if it can't be used


def conversation_as_text(document: Document) -> Document:
    """A conversation as the text of its messages, separated by empty lines; a text as it is."""
    if document.messages is None:
        return document
    return Document(document.location, iter(("\n\n".join(document.contents),)))


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn errors of the disk and of decompression into a DataError that names the file."""
    try:
        with os_errors_as(DataError, "read", name):
            yield
    except (EOFError, zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"{name} is damaged: {error}", "a complete copy of the file") from error


def text_rows(stream: IO[bytes], name: str, advance: Advance, on_bad: OnBad) -> Iterator[Row]:
    """Yield the text of a stream as one row; none if it is empty."""
    pieces = split_pieces(decoded_text(stream, name, advance, on_bad))
    if (first := next(pieces, None)) is not None:
        yield lambda: Document(name, itertools.chain((first,), pieces))


def decoded_text(stream: IO[bytes], name: str, advance: Advance, on_bad: OnBad) -> Iterator[str]:
    """Yield the stream's text in chunks of lines. Lines that are not UTF-8 go to `on_bad` and are left out.

    Of a line longer than `READ_BYTES`, only the part that was read together with the bad byte is left out.
    """
    offset, number = 0, 1  # of the first byte in the buffer, and its line
    buffer = b""
    with reading(name):
        while True:
            chunk = stream.read(READ_BYTES)
            advance(len(chunk))
            buffer += chunk
            if offset == 0 and buffer[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                hint = f"iconv -f UTF-16 -t UTF-8 {name}"
                raise DataError(f"{name} is UTF-16, not UTF-8 text", hint)
            end = buffer.rfind(b"\n") + 1
            if not chunk or (not end and len(buffer) >= READ_BYTES):
                end = len(buffer) if not chunk else _character_end(buffer)
            block, buffer = buffer[:end], buffer[end:]
            text = "".join(_decoded_lines(block, name, offset, number, on_bad))
            if offset == 0:
                text = text.removeprefix("\ufeff")
            offset += len(block)
            number += block.count(b"\n")
            if text:
                yield text
            if not chunk:
                return


def _character_end(data: bytes) -> int:
    """End of the last character of `data` that can be complete."""
    for back in range(1, min(4, len(data) + 1)):
        if data[-back] >= 0xC0:  # first byte of a multi-byte character
            return len(data) - back
        if data[-back] < 0x80:
            break
    return len(data)


def _decoded_lines(block: bytes, name: str, offset: int, number: int, on_bad: OnBad) -> Iterator[str]:
    """Decode `block`, which starts at byte `offset` in line `number`: at once, or line by line if a line is bad."""
    if b"\0" not in block:
        try:
            yield block.decode("utf-8")
            return
        except UnicodeDecodeError:
            pass
    for line in io.BytesIO(block):
        try:
            if b"\0" in line:
                on_bad(invalid_utf8(name, offset + line.index(b"\0"), "a zero byte", number))
            else:
                yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            on_bad(invalid_utf8(name, offset + error.start, f"0x{line[error.start]:02X}", number))
        offset += len(line)
        number += 1


def invalid_utf8(name: str, offset: int, what: str, line: int | None = None) -> DataError:
    """The error for a byte that is not UTF-8 text; `what` describes it."""
    message = f"{name} is not UTF-8 text: {what} at byte {offset}" + (f", in line {line}" if line else "")
    return DataError(message, "text files, or .jsonl; other encodings can be converted with iconv")


def split_pieces(chunks: Iterator[str]) -> Iterator[str]:
    """Split a text into pieces of about `PIECE_CHARS` characters, where tokens rarely cross: see `_piece_end`."""
    buffer = ""
    for chunk in chunks:
        buffer += chunk
        start = 0
        while len(buffer) - start > PIECE_CHARS:
            end = _piece_end(buffer, start)
            yield buffer[start:end]
            start = end
        buffer = buffer[start:]
    if buffer:
        yield buffer


def _piece_end(text: str, start: int) -> int:
    """Where the piece from `start` ends.

    After a single line end between visible text, else after any line end before visible text, else before a single
    space, else after `PIECE_CHARS` characters.
    """
    stop = start + PIECE_CHARS
    fallback = end = text.rfind("\n", start, stop) + 1
    while end > start and (text[end].isspace() or text[end - 2 : end - 1].isspace()):
        if fallback > start and text[fallback].isspace():
            fallback = end
        end = text.rfind("\n", start, end - 1) + 1
    if end > start + 1:
        return end
    if fallback > start and not text[fallback].isspace():
        return fallback
    end = text.rfind(" ", start + 1, stop)
    while end > start and text[end - 1].isspace():
        end = text.rfind(" ", start + 1, end)
    return end if end > start else stop
