"""Rows of JSON lines and arrays, CSV, and Parquet and Arrow files (with pyarrow, the extra "data"), as documents."""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import PurePath
from typing import IO, Any

from mlxlm.data.record_formats import ACCEPTED_RECORDS, document_from_record, find_format
from mlxlm.data.text import READ_BYTES, Advance, Document, Row, decoded_text, invalid_utf8, raise_error, reading
from mlxlm.utils.errors import DataError

MAX_ROW_BYTES = 1 << 28  # of a line: it is in memory as a whole, and a file may have no line ends


def json_rows(stream: io.BufferedReader, name: str, text_column: str | None) -> Iterator[Row]:
    """Yield a row for each line of JSON that isn't blank, or for each element of one JSON array."""
    if stream.peek(READ_BYTES).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
        for number, value in enumerate(_array_elements(stream, name), start=1):
            yield partial(document_from_record, value, f"{name}, row {number}", text_column)
        return
    offset = number = 0
    while line := stream.readline(MAX_ROW_BYTES + 1):
        number += 1
        size, location = len(line), f"{name}, line {number}"
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if size > MAX_ROW_BYTES:
            error = DataError(f"{location} is longer than {MAX_ROW_BYTES} bytes", "one object on each line")
            yield partial(raise_error, error)
            while not line.endswith(b"\n") and (line := stream.readline(MAX_ROW_BYTES)):
                size += len(line)
        elif line.strip():
            yield partial(_json_document, line, location, offset, text_column)
        offset += size


def _json_document(line: bytes, location: str, offset: int, text_column: str | None) -> Document | None:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise invalid_utf8(location, offset + error.start, f"0x{line[error.start]:02X}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{location} is not valid JSON: {error}", ACCEPTED_RECORDS) from error
    return document_from_record(record, location, text_column)


def _array_elements(stream: IO[bytes], name: str) -> Iterator[Any]:
    """Yield the elements of a JSON array, with one of them in memory at a time."""
    chunks, decoder = decoded_text(stream, name, lambda _: None, raise_error), json.JSONDecoder()
    separator, count = re.compile(r"\s*\[\s*(\]\s*)?"), 0
    text, start, wanted, has_ended = "", 0, 1, False  # `wanted`: characters to have before an element is parsed
    while True:
        while not has_ended and len(text) - start < wanted:
            chunk = next(chunks, None)
            text, start, has_ended = text[start:] + (chunk or ""), 0, chunk is None
        try:
            match = separator.match(text, start)
            if match is None:
                raise json.JSONDecodeError("expecting ',' or ']'", text, start)
            if match[1]:
                if text[match.end() :] or any(chunk.strip() for chunk in chunks):
                    raise DataError(f"{name} has more behind its JSON array", "one array, or one object on each line")
                return
            value, start = decoder.raw_decode(text, match.end())
        except (ValueError, RecursionError) as error:
            wanted = 2 * (len(text) - start)
            if has_ended or wanted > MAX_ROW_BYTES or isinstance(error, RecursionError):
                reason = getattr(error, "msg", str(error))
                raise DataError(f"{name} is not valid JSON after row {count}: {reason}", ACCEPTED_RECORDS) from None
            continue
        separator, count, wanted = re.compile(r"\s*(?:,\s*|(\]\s*))"), count + 1, 1
        yield value


def csv_rows(stream: IO[bytes], name: str, delimiter: str, text_column: str | None) -> Iterator[Row]:
    """Yield the rows of a table with a header."""
    csv.field_size_limit(MAX_ROW_BYTES)
    # A byte that isn't UTF-8 becomes half of a surrogate pair, so that only its row is bad.
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    rows, number = csv.reader(text, delimiter=delimiter, strict=True), 0
    try:
        header = next(filter(None, rows), None)
        if header is None:
            return
        _check_utf8("".join(header), name)
        columns = _columns(header, name, text_column)
        for number, row in enumerate(rows, start=1):
            cells = dict(zip(header, row, strict=False))
            cells = {column: cells[column] for column in columns if column in cells}
            yield partial(_csv_document, cells, f"{name}, row {number}", text_column)
    except csv.Error as error:
        raise DataError(f"{name} is damaged after row {number}: {error}", "a table with quoted cells") from error


def _csv_document(cells: dict[str, str], location: str, text_column: str | None) -> Document | None:
    _check_utf8("".join(cells.values()), location)
    return document_from_record(cells, location, text_column) if cells else None


def _check_utf8(text: str, location: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{location} is not UTF-8 text", "iconv, which converts other encodings") from None


def _columns(names: Sequence[str], table: str, text_column: str | None) -> list[str]:
    """The columns of a table to read. Raises DataError, with the names of all, if it has no known format."""
    format = find_format(names, table, "columns", text_column)
    columns = [*format.fields, *(name for name in format.optional_fields if name in names)]
    if repeated := [name for name in columns if names.count(name) > 1]:
        raise DataError(f"{table} has several columns '{repeated[0]}'", "one column of each name")
    return columns


TABLE_SUFFIXES = (".parquet", ".arrow")
_ROWS = 64  # converted to Python objects at a time: documents can be long
_BUFFER_BYTES = 1 << 20  # of a Parquet column that are read at a time


def table_rows(source: Any, name: str, size: int, advance: Advance, text_column: str | None) -> Iterator[Row]:
    """Yield the rows of a Parquet or Arrow file.

    Memory: one page of each column that is read (Parquet), or a memory-mapped batch of rows (Arrow).

    Args:
        source: The path of a local file, or a stream that can seek.
        name: The file, for error messages; its suffix tells which kind it is.
        size: Its bytes.
        advance: Called with the number of bytes read.
        text_column: See `document_from_record`.
    """
    reported = number = 0
    with reading(name):
        if size == 0:
            return
        for records, share in _records(source, name, text_column):
            for record in records:
                number += 1
                yield partial(document_from_record, record, f"{name}, row {number}", text_column)
            done = int(share * size)
            advance(done - reported)
            reported = done
    advance(size - reported)


def _records(source: Any, name: str, text_column: str | None) -> Iterator[tuple[list[Any], float]]:
    """Yield some rows, and the fraction of the file read so far."""
    try:
        import pyarrow
    except ImportError:
        raise DataError(f"reading {name} needs pyarrow", "pip install 'mlxlm[data]'") from None
    try:
        if PurePath(name).suffix.lower() == ".parquet":
            yield from _parquet(source, name, text_column)
        else:
            is_local = isinstance(source, PurePath)
            with pyarrow.memory_map(str(source)) if is_local else pyarrow.PythonFile(source, "r") as file:
                yield from _arrow(pyarrow, file, name, text_column)
    except (pyarrow.ArrowException, OSError, MemoryError, ValueError, KeyError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # a disk error
            raise
        raise DataError(f"{name} is damaged: {error}", "a complete copy of the file") from error


def _parquet(source: Any, name: str, text_column: str | None) -> Iterator[tuple[list[Any], float]]:
    from pyarrow import parquet

    with parquet.ParquetFile(source, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
        columns = _columns(file.schema_arrow.names, name, text_column)
        done, rows = 0, max(1, file.metadata.num_rows)
        for batch in file.iter_batches(_ROWS, columns=columns, use_threads=False):
            done += len(batch)
            yield _rows_of(batch), min(1.0, done / rows)


def _arrow(pyarrow: Any, source: Any, name: str, text_column: str | None) -> Iterator[tuple[list[Any], float]]:
    """Read the file format, or the stream format that `save_to_disk` writes."""
    size = max(1, source.size())
    if source.read(6) == b"ARROW1":
        reader = pyarrow.ipc.open_file(source)
        count = reader.num_record_batches
        batches = ((reader.get_batch(i), (i + 1) / count) for i in range(count))
    else:
        source.seek(0)
        reader = pyarrow.ipc.open_stream(source)
        batches = ((batch, source.tell() / size) for batch in reader)
    columns = _columns(reader.schema.names, name, text_column)
    before = 0.0
    for batch, share in batches:
        batch = batch.select(columns)
        for start in range(0, len(batch), _ROWS):
            read = min(1.0, (start + _ROWS) / len(batch))  # of the batch, which can be the whole file
            yield _rows_of(batch.slice(start, _ROWS)), before + read * (share - before)
        before = share


def _rows_of(batch: Any) -> list[Any]:
    batch.validate(full=True)  # pyarrow reads at the offsets in the file without checking them
    return [{name: _without_nulls(cell) for name, cell in row.items()} for row in batch.to_pylist()]


def _without_nulls(value: Any) -> Any:
    """A cell without the fields that are null: all structures of a column have the fields that any of them has."""
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
