"""A text as a stream of pieces, decoded and cut in bounded memory."""

from __future__ import annotations

import codecs
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import zstandard

from mlxlm.data.bad_input import OnBad
from mlxlm.utils.errors import DataError, os_errors_as

PIECE_CHARS = 1 << 14  # characters: small enough to bound memory, large enough for the tokenizer's threads
READ_BYTES = 1 << 16  # bytes

Advance = Callable[[int], None]


@dataclass
class Document:
    """One text, as a stream of pieces to be read once and in order; or one conversation.

    pieces: text of about PIECE characters each, cut after a line end where there is one. Empty for a conversation.
    messages: (role, content) pairs, or None for a text.
    location: the file, with the line for JSON lines, for messages about it.
    begins, ends: False where the document was cut there: no token says that it begins or ends.
    """

    location: str
    pieces: Iterator[str]
    messages: list[tuple[str, str]] | None = None
    add_bos: bool = True
    add_eos: bool = True


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Errors of the disk and of the decompressors, as a DataError that names the file."""
    try:
        with os_errors_as(DataError, "read", name):
            yield
    except (EOFError, zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"{name} is damaged: {error}", "a complete copy of the file") from error


def text_document(stream: IO[bytes], name: str, advance: Advance, explicit: bool, on_bad: OnBad) -> Iterator[Document]:
    pieces = split_pieces(_decoded(stream, name, advance, on_bad))
    first = next(pieces, None)
    if first is not None:
        yield Document(name, _chain(first, pieces))
    elif explicit:
        raise DataError(f"{name} is empty", "a file with some text")


def _chain(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _decoded(stream: IO[bytes], name: str, advance: Advance, on_bad: OnBad) -> Iterator[str]:
    """The stream's text in chunks of lines; `on_bad` is told of each line that is not UTF-8 text, which is left out. Of
    a line that is longer than READ bytes it is the part that is read together."""
    done, number = 0, 1  # bytes before those that are held, and the line that these begin in
    held = b""
    with reading(name):
        while True:
            chunk = stream.read(READ_BYTES)
            advance(len(chunk))
            held += chunk
            if done == 0 and held[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                hint = f"iconv -f UTF-16 -t UTF-8 {name}"
                raise DataError(f"{name} is UTF-16, not UTF-8 text", hint)
            end = held.rfind(b"\n") + 1
            if not chunk or (not end and len(held) >= READ_BYTES):
                end = len(held) if not chunk else _character_end(held)
            block, held = held[:end], held[end:]
            text = "".join(_lines(block, name, done, number, on_bad))
            if done == 0:
                text = text.removeprefix("\ufeff")
            done += len(block)
            number += block.count(b"\n")
            if text:
                yield text
            if not chunk:
                return


def _character_end(data: bytes) -> int:
    """Where the last character of `data` that may be complete ends."""
    for back in range(1, min(4, len(data) + 1)):
        if data[-back] >= 0xC0:  # begins a character of two to four bytes
            return len(data) - back
        if data[-back] < 0x80:
            break
    return len(data)


def _lines(block: bytes, name: str, done: int, number: int, on_bad: OnBad) -> Iterator[str]:
    """The text of `block`, which begins at byte `done` in line `number`: at once, or line by line where one is bad."""
    if b"\0" not in block:
        try:
            yield block.decode("utf-8")
            return
        except UnicodeDecodeError:
            pass
    for line in io.BytesIO(block):
        try:
            if b"\0" in line:
                raise invalid_utf8(name, done + line.index(b"\0"), "a zero byte", number)
            yield line.decode("utf-8")
        except UnicodeDecodeError as error:
            on_bad(invalid_utf8(name, done + error.start, f"0x{line[error.start]:02X}", number))
        except DataError as error:
            on_bad(error)
        done += len(line)
        number += 1


def invalid_utf8(name: str, offset: int, what: str, line: int | None = None) -> DataError:
    message = f"{name} is not UTF-8 text: {what} at byte {offset}" + (f", in line {line}" if line else "")
    return DataError(message, "text files, or .jsonl; other encodings can be converted with iconv")


def split_pieces(chunks: Iterator[str]) -> Iterator[str]:
    """Cut a text into pieces of about PIECE characters, where tokens rarely cross: see `_cut`."""
    buffer = ""
    for chunk in chunks:
        buffer += chunk
        start = 0
        while len(buffer) - start > PIECE_CHARS:
            end = _cut(buffer, start)
            yield buffer[start:end]
            start = end
        buffer = buffer[start:]
    if buffer:
        yield buffer


def _cut(text: str, start: int) -> int:
    """Where the piece from `start` ends: after a single line end between visible text, else after any line end
    before visible text, else before a lone space, else after PIECE characters."""
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
