"""Reads text from files, folders, JSON, tables, stdin and the hub, compressed or not, in bounded memory."""

from __future__ import annotations

import gzip
import io
import os
import shutil
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import replace
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from typing import IO, Any, BinaryIO

import zstandard

from mlxlm.data.hub_files import HubFile, hub_files, is_hub_path
from mlxlm.data.rows import TABLE_SUFFIXES, csv_rows, json_rows, table_rows
from mlxlm.data.text import READ_BYTES, Advance, Document, OnBad, Row, raise_error, reading, text_rows
from mlxlm.utils.errors import DataError, os_errors_as
from mlxlm.utils.json_files import read_json_object

STDIN = "-"
COMPRESSED = (".gz", ".zst")
_DELIMITERS = {".csv": ",", ".tsv": "\t"}
_COMPRESSIBLE = (".txt", ".md", ".jsonl", *_DELIMITERS)
_HUB_SUFFIXES = (".jsonl", ".json", *_DELIMITERS, ".txt", *TABLE_SUFFIXES, *COMPRESSED)
FOLDER_SUFFIXES = (*_COMPRESSIBLE, *TABLE_SUFFIXES)  # files that are read from a folder


def read_documents(
    paths: Sequence[str | Path],
    *,
    stdin: IO[bytes] | None = None,
    advance: Advance | None = None,
    text_column: str | None = None,
    on_bad: OnBad = raise_error,
    fraction: float = 1.0,
) -> Iterator[Document]:
    """Yield the documents of `paths` in order. Read each to its end before the next.

    Args:
        paths: Each is one of:

            - a text file: one document;
            - a .jsonl or .json file: one document per line, or per element of an array, in any of the formats of
              `mlxlm.data.record_formats`;
            - a .csv or .tsv file with a header: one document per row, whose columns are the fields of a format;
            - any of these compressed, as .gz or .zst;
            - a .parquet or .arrow file: the same;
            - a folder: its files of these kinds, recursively and sorted, without hidden and empty ones; of a dataset
              that Hugging Face's `save_to_disk` wrote, the data files;
            - `hf://datasets/OWNER/NAME`, a dataset on the Hugging Face hub, or files of it: see `hub_files`;
            - "-": `stdin`, one text.

            Rows without text are left out. A byte order mark is removed; nothing else is changed.
        stdin: The stream for "-".
        advance: Called with the number of bytes read from disk or the hub, before decompression.
        text_column: Column (in JSON lines, key) that holds the text or the messages, whatever the format is.
        on_bad: Called with the error of each line or row that can't be used, which is then left out; raises it by
            default. See `BadInput`.
        fraction: Share of the bytes to read: the beginning of each large file, and some of many small ones.

    Raises:
        DataError: A path is missing, empty, unreadable, damaged or not UTF-8, a row has no known format, or
            `text_column` is given for a plain text; the message names the file and the line, row or byte.
    """
    allowance, over = 0.0, False  # bytes that may be read; whether the last read was beyond them

    def count(n: int) -> None:
        nonlocal allowance, over
        over = n > 0 and allowance <= 0
        allowance -= n
        if advance is not None:
            advance(n)

    def allowed(pieces: Iterator[str]) -> Iterator[str]:
        for piece in pieces:
            yield piece
            if over:
                return

    for path, explicit in _files(paths):
        documents = _documents(stdin if path is None else path, count, text_column, explicit, on_bad)
        if path is None or fraction >= 1:
            yield from documents
            continue
        allowance += fraction * _size(path)
        over = allowance <= 0
        with closing(documents):
            while not over and (document := next(documents, None)) is not None:
                yield replace(document, pieces=allowed(document.pieces))


def _documents(
    source: Path | HubFile | IO[bytes] | None, advance: Advance, text_column: str | None, explicit: bool, on_bad: OnBad
) -> Generator[Document, None, None]:
    """Yield the documents of a file or of stdin. An empty one is an error if it is `explicit`. See `read_documents`."""
    if source is None:
        raise DataError("there is no stdin to read", "a file")
    name = str(source) if isinstance(source, Path | HubFile) else "stdin"
    row = None
    with source.errors() if isinstance(source, HubFile) else nullcontext():
        for row in _rows(source, name, advance, text_column, explicit, on_bad):
            try:
                document = row()
            except DataError as error:
                on_bad(error)
            else:
                if document is not None:
                    yield document
    if row is None and explicit:
        raise DataError(f"{name} is empty", "a file with some text")


def _rows(
    source: Path | HubFile | IO[bytes],
    name: str,
    advance: Advance,
    text_column: str | None,
    explicit: bool,
    on_bad: OnBad,
) -> Iterator[Row]:
    file = source if isinstance(source, Path | HubFile) else None
    suffix = "" if file is None else _plain_suffix(name)
    with reading(name), ExitStack() as stack:
        if file is not None and suffix in TABLE_SUFFIXES:
            table = file if isinstance(file, Path) else stack.enter_context(file.open(False))
            yield from table_rows(table, name, _size(file), advance, text_column)
            return
        stream: Any = source
        if file is not None:
            raw = stack.enter_context(file.open(True) if isinstance(file, HubFile) else file.open("rb", buffering=0))
            stream = _decompressed(io.BufferedReader(_CountingReader(raw, advance), READ_BYTES), name)
        if suffix in (".jsonl", ".json"):
            yield from json_rows(stream, name, text_column)
        elif suffix in _DELIMITERS:
            yield from csv_rows(stream, name, _DELIMITERS[suffix], text_column)
        elif explicit and text_column is not None:
            problem = f"{name} is plain text, without a column '{text_column}'"
            raise DataError(problem, "a .jsonl, .csv or .parquet file")
        else:
            yield from text_rows(stream, name, advance if stream is source else lambda _: None, on_bad)


def read_texts(paths: Sequence[str | Path], **options: Any) -> Iterator[str]:
    """Yield the text of `read_documents` in pieces, with the messages of conversations: for training tokenizers."""
    for document in read_documents(paths, **options):
        yield from document.pieces
        yield from document.contents


def unseekable_source(paths: Sequence[str | Path]) -> str | None:
    """The first of `paths` that can be read only once: "stdin" or a named pipe; None if there is none."""
    streams = (path for path in map(str, paths) if path == STDIN or Path(path).is_fifo())
    return next(("stdin" if path == STDIN else path for path in streams), None)


def spool_streams(
    paths: Sequence[str | Path], stdin: IO[bytes] | None, folder: Path, stack: ExitStack
) -> list[str | Path]:
    """Copy stdin and named pipes into `folder`, until `stack` is closed; returns the paths to read instead."""
    spooled: list[str | Path] = []
    for path in paths:
        source = stdin if str(path) == STDIN else None
        if source is not None or Path(path).is_fifo():
            copy = Path(stack.enter_context(TemporaryDirectory(dir=folder)), "stdin" if source else Path(path).name)
            with nullcontext(source) if source else open(path, "rb") as stream, copy.open("wb") as file:
                shutil.copyfileobj(stream, file, READ_BYTES)
            path = copy
        spooled.append(path)
    return spooled


def total_bytes(paths: Sequence[str | Path]) -> int | None:
    """Bytes on disk, or on the hub, that `read_documents(paths)` reads; None if stdin is among them."""
    total = 0
    for path, _ in _files(paths):
        if path is None:
            return None
        total += _size(path)
    return total


def _size(file: Path | HubFile) -> int:
    if isinstance(file, HubFile):
        return file.size
    with os_errors_as(DataError, "read", file):
        return file.stat().st_size


def _files(paths: Sequence[str | Path]) -> Iterator[tuple[Path | HubFile | None, bool]]:
    """Files of `paths` in order, None for stdin, each with whether it must have text.

    A file must if the user or a saved dataset names it.
    """
    for path in paths:
        if str(path) == STDIN:
            yield None, True
        elif is_hub_path(path):
            yield from ((file, True) for file in hub_files(str(path), _HUB_SUFFIXES))
        elif (path := Path(path)).is_dir():
            file = None
            for file, explicit in _folder(path):
                yield file, explicit
            if file is None:
                kinds = f"{', '.join(_COMPRESSIBLE)} (also as .gz or .zst), {' or '.join(TABLE_SUFFIXES)} files"
                raise DataError(f"no text in {path}", f"a folder with {kinds}")
        elif path.exists():
            yield path, True
        else:
            raise DataError(f"cannot read {path}: no such file or folder", "check the path")


def _folder(path: Path) -> Iterator[tuple[Path, bool]]:
    for folder, subfolders, names in os.walk(path):
        saved = hf_dataset_files(Path(folder))
        if saved is not None:
            yield from ((file, True) for file in saved)
            subfolders.clear()
            continue
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(names):
            file = Path(folder, name)
            # Opening a pipe would block; a broken link is an error when it is read.
            if not name.startswith(".") and _plain_suffix(name) in FOLDER_SUFFIXES and not file.is_fifo():
                yield file, False


def _plain_suffix(name: str) -> str:
    """The suffix without compression: ".jsonl" for x.jsonl.gz. Tables are compressed internally."""
    path = PurePath(name)
    suffix = path.suffix.lower()
    if suffix not in COMPRESSED:
        return suffix
    inner = PurePath(path.stem).suffix.lower()
    return inner if inner not in TABLE_SUFFIXES else suffix


class _CountingReader(io.RawIOBase):
    """A raw file whose reads are counted."""

    def __init__(self, raw: Any, advance: Advance):
        self._raw = raw
        self._advance = advance

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        n = self._raw.readinto(buffer)
        self._advance(n)
        return n


def _decompressed(stream: BinaryIO, name: str) -> BinaryIO:
    suffix = PurePath(name).suffix.lower()
    if suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=stream), READ_BYTES)
    if suffix == ".zst":
        reader = zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True)
        return io.BufferedReader(reader, READ_BYTES)
    return stream


_MAX_BYTES = 1 << 26  # of state.json
_HINT = "saving the dataset again"


def hf_dataset_files(folder: Path) -> list[Path] | None:
    """The Arrow files of a saved `Dataset`, or of a `DatasetDict` with one split, in order; None for other folders.

    Raises:
        DataError: The folder is damaged, has several splits, or has a shuffled or filtered order of rows.
    """
    if (folder / "dataset_dict.json").is_file():
        path = folder / "dataset_dict.json"
        splits = _names(read_json_object(path, _MAX_BYTES, DataError, _HINT).get("splits"), f"{path}: field 'splits'")
        if len(splits) != 1:
            hint = f"one of them, such as {folder / splits[0]}" if splits else _HINT
            raise DataError(f"{folder} has the splits {', '.join(splits) or 'none'}", hint)
        folder /= splits[0]
        if not (folder / "state.json").is_file():
            raise DataError(f"{folder} is not a saved dataset: it has no state.json", _HINT)
    elif not ((folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()):
        return None
    path = folder / "state.json"
    state = read_json_object(path, _MAX_BYTES, DataError, _HINT)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise DataError(f"{folder} was saved with an indices mapping", "dataset.flatten_indices().save_to_disk(...)")
    files = state.get("_data_files")
    if isinstance(files, list):
        files = [file.get("filename") if isinstance(file, dict) else None for file in files]
    return [folder / name for name in _names(files, f"{path}: field '_data_files'")]


def _names(names: Any, field: str) -> list[str]:
    """Check a list of names of something directly inside a folder."""
    if isinstance(names, list) and all(isinstance(n, str) and Path(n).name == n not in ("", "..") for n in names):
        return names
    raise DataError(f"{field} is not a list of plain names", _HINT)
