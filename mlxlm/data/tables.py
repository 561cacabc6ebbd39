"""Reads Parquet and Arrow files, a document per row, with pyarrow (the extra "data")."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxlm.data.bad_input import OnBad
from mlxlm.data.rows import document_from_cell, find_text_column
from mlxlm.data.text import Advance, Document, reading
from mlxlm.utils.errors import DataError

TABLE_SUFFIXES = (".parquet", ".arrow")
_ROWS = 64  # converted to Python objects at a time: documents can be long
_BUFFER_BYTES = 1 << 20  # of a Parquet column that are read at a time


def table_documents(
    path: Path, advance: Advance, text_column: str | None, explicit: bool, on_bad: OnBad
) -> Iterator[Document]:
    """Yield a document per row, see `read_documents`. Rows whose cell is null or empty are left out.

    Memory: one page of one column (Parquet), or a memory-mapped batch of rows (Arrow).
    """
    with reading(str(path)):
        size = path.stat().st_size
    if size == 0 and not explicit:
        return
    reported = number = 0
    for column, values, share in _columns(path, text_column):
        for value in values:
            number += 1
            try:
                document = None if value is None else document_from_cell(value, column, f"{path}, row {number}")
            except DataError as error:
                on_bad(error)
                continue
            if document is not None:
                yield document
        done = int(share * size)
        advance(done - reported)
        reported = done
    advance(size - reported)
    if number == 0 and explicit:
        raise DataError(f"{path} has no rows", "a file with some text")


def _columns(path: Path, text_column: str | None) -> Iterator[tuple[str, list[Any], float]]:
    """Yield the column's name, cells of some rows, and the fraction of the file read so far."""
    pyarrow = _pyarrow(path)
    with reading(str(path)), _table_errors(path, pyarrow):
        if path.suffix.lower() == ".parquet":
            yield from _parquet(path, text_column)
        else:
            with pyarrow.memory_map(str(path)) as source:
                yield from _arrow(pyarrow, source, path, text_column)


def _parquet(path: Path, text_column: str | None) -> Iterator[tuple[str, list[Any], float]]:
    from pyarrow import parquet

    with parquet.ParquetFile(path, buffer_size=_BUFFER_BYTES, pre_buffer=False) as file:
        column = find_text_column(file.schema_arrow.names, str(path), text_column)
        done, rows = 0, max(1, file.metadata.num_rows)
        for batch in file.iter_batches(_ROWS, columns=[column], use_threads=False):
            done += len(batch)
            yield column, _cells(batch.column(0)), min(1.0, done / rows)


def _arrow(pyarrow: Any, source: Any, path: Path, text_column: str | None) -> Iterator[tuple[str, list[Any], float]]:
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
    column = find_text_column(reader.schema.names, str(path), text_column)
    index = reader.schema.get_field_index(column)
    before = 0.0
    for batch, share in batches:
        cells = batch.column(index)
        for start in range(0, len(cells), _ROWS):
            read = min(1.0, (start + _ROWS) / len(cells))  # of the batch, which can be the whole file
            yield column, _cells(cells.slice(start, _ROWS)), before + read * (share - before)
        before = share


def _cells(values: Any) -> list[Any]:
    values.validate(full=True)  # pyarrow reads at the offsets in the file without checking them
    return values.to_pylist()


@contextmanager
def _table_errors(path: Path, pyarrow: Any) -> Iterator[None]:
    """Turn pyarrow's errors for damaged files into a DataError that names the file."""
    try:
        yield
    except (pyarrow.ArrowException, OSError, MemoryError, ValueError, KeyError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # a disk error
            raise
        raise DataError(f"{path} is damaged: {error}", "a complete copy of the file") from error


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise DataError(f"reading {path} needs pyarrow", "pip install 'mlxlm[data]'") from None
    return pyarrow
