"""Where text comes from: files, folders, JSON lines, compressed or not, and stdin; read in bounded memory."""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import zstandard

from mlxlm.errors import DataError, os_errors_as

STDIN = "-"
COMPRESSED = (".gz", ".zst")
FOLDER_SUFFIXES = (".txt", ".md", ".jsonl")  # what is taken from a folder, compressed or not
PIECE = 1 << 14  # characters: small enough to bound memory, large enough for the tokenizer's threads
_READ = 1 << 16  # bytes

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


def documents(
    paths: Sequence[str | Path], *, stdin: IO[bytes] | None = None, advance: Advance | None = None
) -> Iterator[Document]:
    """The documents of `paths`, in order; each must be read to its end before the next is asked for.

    A path is a text file (one document), a .jsonl file (one per row: {"text": ...} or {"messages": [{"role",
    "content"}, ...]}), either also with .gz or .zst, a folder (its .txt, .md and .jsonl files, recursively,
    sorted; hidden and empty ones are left out) or "-": `stdin`, one text. Rows without text are left out. A
    byte order mark is removed; nothing else is changed.

    advance: called with the number of bytes read from disk (before decompression), as they are read.

    Raises DataError, naming the file and the line or byte, for a path that is missing, empty, unreadable, not
    UTF-8 text or damaged, and for rows that are not as above.
    """
    advance = advance or (lambda _: None)
    for path, named in _files(paths):
        if path == STDIN:
            if stdin is None:
                raise DataError("stdin was asked for, but there is none", "a file")
            yield from _text_document(stdin, "stdin", advance, named)
            continue
        name = str(path)
        with _reading(name), open(path, "rb", buffering=0) as raw:
            counted = io.BufferedReader(_Counted(raw, advance), _READ)
            stream = _decompressed(counted, path)
            if _plain_suffix(path) == ".jsonl":
                yield from _rows(stream, name, named)
            else:
                yield from _text_document(stream, name, lambda _: None, named)


def texts(
    paths: Sequence[str | Path], *, stdin: IO[bytes] | None = None, advance: Advance | None = None
) -> Iterator[str]:
    """All text of `documents(...)` in pieces, contents of conversations included: for training tokenizers."""
    for document in documents(paths, stdin=stdin, advance=advance):
        yield from document.pieces
        for _, content in document.messages or ():
            yield content


def total_bytes(paths: Sequence[str | Path]) -> int | None:
    """The bytes on disk that `documents(paths)` will read; None where stdin is among them."""
    files = [path for path, _ in _files(paths)]
    if STDIN in files:
        return None
    with os_errors_as(DataError, "read", "the sources"):
        return sum(os.path.getsize(path) for path in files)


def _files(paths: Sequence[str | Path]) -> Iterator[tuple[str | Path, bool]]:
    """Files of `paths` in order, each with whether it was named itself (and not found in a folder)."""
    for path in paths:
        if str(path) == STDIN:
            yield STDIN, True
        elif (path := Path(path)).is_dir():
            found = False
            for file in _folder(path):
                found = True
                yield file, False
            if not found:
                kinds = ", ".join(FOLDER_SUFFIXES)
                raise DataError(f"no text in {path}", f"a folder with {kinds} files (or .gz, .zst of them)")
        elif path.exists():
            yield path, True
        else:
            raise DataError(f"cannot read {path}: no such file or folder", "check the path")


def _folder(path: Path) -> Iterator[Path]:
    for folder, subfolders, names in os.walk(path):
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(names):
            if not name.startswith(".") and _plain_suffix(Path(name)) in FOLDER_SUFFIXES:
                yield Path(folder, name)


def _plain_suffix(path: Path) -> str:
    """The suffix below the compression's: ".jsonl" for x.jsonl.gz."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSED else suffix


class _Counted(io.RawIOBase):
    """Reads of a raw file, counted."""

    def __init__(self, raw: Any, advance: Advance):
        self._raw = raw
        self._advance = advance

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        n = self._raw.readinto(buffer)
        self._advance(n)
        return n


def _decompressed(stream: IO[bytes], path: Path) -> IO[bytes]:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=stream)
    if suffix == ".zst":
        reader = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
        return io.BufferedReader(reader, _READ)
    return stream


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Errors of the disk and of the decompressors, as a DataError that names the file."""
    try:
        with os_errors_as(DataError, "read", name):
            yield
    except (EOFError, zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"{name} is damaged: {error}", "a complete copy of the file") from error


def _text_document(stream: IO[bytes], name: str, advance: Advance, named: bool) -> Iterator[Document]:
    pieces = _pieces(_decoded(stream, name, advance))
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
    with _reading(name):
        while True:
            chunk = stream.read(_READ)
            advance(len(chunk))
            if done == 0 and chunk[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                hint = f"iconv -f UTF-16 -t UTF-8 {name}"
                raise DataError(f"{name} is UTF-16, not UTF-8 text", hint)
            if b"\0" in chunk:
                raise _binary(name, done + chunk.index(b"\0"), "a zero byte")
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                at = done - held + error.start
                raise _binary(name, at, f"0x{error.object[error.start]:02X}") from error
            if done == 0:
                text = text.removeprefix("\ufeff")
            done += len(chunk)
            held = len(decoder.getstate()[0])
            if text:
                yield text
            if not chunk:
                return


def _binary(name: str, offset: int, what: str) -> DataError:
    message = f"{name} is not UTF-8 text: {what} at byte {offset}"
    return DataError(message, "text files, or .jsonl; other encodings can be converted with iconv")


def _pieces(chunks: Iterator[str]) -> Iterator[str]:
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


def _rows(stream: IO[bytes], name: str, named: bool) -> Iterator[Document]:
    empty = True
    offset = 0
    for number, line in enumerate(stream, 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if line.strip():
            empty = False
            document = _row(line, f"{name}, line {number}", offset)
            if document is not None:
                yield document
        offset += len(line)
    if empty and named:
        raise DataError(f"{name} is empty", 'rows such as {"text": "..."}')


def _row(line: bytes, where: str, offset: int) -> Document | None:
    """The document of one row; None if it has no text."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _binary(where, offset + error.start, f"0x{line[error.start]:02X}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON: {error}", 'rows such as {"text": "..."}') from error
    if not isinstance(row, dict) or ("text" in row) == ("messages" in row):
        raise DataError(f"{where} must have either 'text' or 'messages'", 'rows such as {"text": "..."}')
    if "messages" in row:
        messages = [_message(message, where) for message in _list(row["messages"], where)]
        return Document(where, iter(()), messages) if messages else None
    text = _string(row["text"], where, "text")
    return Document(where, _pieces(iter((text,)))) if text else None


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list):
        raise DataError(f"{where}: 'messages' is not a list", '[{"role": "user", "content": "..."}, ...]')
    return value


def _message(message: Any, where: str) -> tuple[str, str]:
    if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
        raise DataError(f"{where}: a message must have 'role' and 'content'")
    return _string(message["role"], where, "role"), _string(message["content"], where, "content")


def _string(value: Any, where: str, field: str) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: '{field}' is not text but {type(value).__name__}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: '{field}' has half of a surrogate pair at {error.start}") from error
    return value
