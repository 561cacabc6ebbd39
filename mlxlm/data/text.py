"""A text as a stream of pieces, decoded and cut in bounded memory."""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import zstandard

from mlxlm.errors import DataError, os_errors_as

PIECE = 1 << 14  # characters: small enough to bound memory, large enough for the tokenizer's threads
READ = 1 << 16  # bytes

Advance = Callable[[int], None]


@dataclass
class Document:
    """One text, as a stream of pieces to be read once and in order; or one conversation.

    pieces: text of about PIECE characters each, cut after a line end where there is one. Empty for a conversation.
    messages: (role, content) pairs, or None for a text.
    where: the file, with the line for JSON lines, for messages about it.
    """

    where: str
    pieces: Iterator[str]
    messages: list[tuple[str, str]] | None = None


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Errors of the disk and of the decompressors, as a DataError that names the file."""
    try:
        with os_errors_as(DataError, "read", name):
            yield
    except (EOFError, zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"{name} is damaged: {error}", "a complete copy of the file") from error


def text_document(stream: IO[bytes], name: str, advance: Advance, named: bool) -> Iterator[Document]:
    pieces = pieces_of(_decoded(stream, name, advance))
    first = next(pieces, None)
    if first is not None:
        yield Document(name, _chain(first, pieces))
    elif named:
        raise DataError(f"{name} is empty", "a file with some text")


def _chain(first: str, rest: Iterator[str]) -> Iterator[str]:
    yield first
    yield from rest


def _decoded(stream: IO[bytes], name: str, advance: Advance) -> Iterator[str]:
    """The stream's text in chunks. Raises DataError at the first byte that is not UTF-8 text."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    done = 0  # bytes before this chunk
    held = 0  # of them, those of an unfinished character, which the decoder keeps
    with reading(name):
        while True:
            chunk = stream.read(READ)
            advance(len(chunk))
            if done == 0 and chunk[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                hint = f"iconv -f UTF-16 -t UTF-8 {name}"
                raise DataError(f"{name} is UTF-16, not UTF-8 text", hint)
            if b"\0" in chunk:
                raise not_text(name, done + chunk.index(b"\0"), "a zero byte")
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                at = done - held + error.start
                raise not_text(name, at, f"0x{error.object[error.start]:02X}") from error
            if done == 0:
                text = text.removeprefix("\ufeff")
            done += len(chunk)
            held = len(decoder.getstate()[0])
            if text:
                yield text
            if not chunk:
                return


def not_text(name: str, offset: int, what: str) -> DataError:
    message = f"{name} is not UTF-8 text: {what} at byte {offset}"
    return DataError(message, "text files, or .jsonl; other encodings can be converted with iconv")


def pieces_of(chunks: Iterator[str]) -> Iterator[str]:
    """Cut a text into pieces of about PIECE characters, where tokens rarely cross: see `_cut`."""
    buffer = ""
    for chunk in chunks:
        buffer += chunk
        start = 0
        while len(buffer) - start > PIECE:
            end = _cut(buffer, start)
            yield buffer[start:end]
            start = end
        buffer = buffer[start:]
    if buffer:
        yield buffer


def _cut(text: str, start: int) -> int:
    """Where the piece from `start` ends: after a single line end between visible text, else after any line end
    before visible text, else before a lone space, else after PIECE characters."""
    stop = start + PIECE
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
