"""Parquet and Arrow files, a document for each row. They are read by pyarrow, which the extra "data" brings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxlm.data.bad_input import OnBad
from mlxlm.data.rows import TEXT_COLUMNS, document_from_cell
from mlxlm.data.text import Advance, Document, reading
from mlxlm.utils.errors import DataError

TABLE_SUFFIXES = (".parquet", ".arrow")
_ROWS = 64  # that are Python objects at a time: documents can be long
_BUFFER = 1 << 20  # bytes of a parquet column that are read at once


def table_documents(
    path: Path, advance: Advance, text_column: str | None, explicit: bool, on_bad: OnBad
) -> Iterator[Document]:
    """A document for each row; rows whose cell is null or empty are left out, and those that `on_bad` is told of. See
    `read_documents` of data.sources.

    One page of one column (parquet) or a batch of rows mapped into memory (arrow) is held at a time.
    """
    with reading(str(path)):
        size = path.stat().st_size
    if size == 0 and not explicit:
        return
    told = 0
    number = 0
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
        advance(done - told)
        told = done
    advance(size - told)
    if number == 0 and explicit:
        raise DataError(f"{path} has no rows", "a file with some text")


def _columns(path: Path, text_column: str | None) -> Iterator[tuple[str, list[Any], float]]:
    """The column's name, cells of some rows, and the share of the file that is done."""
    pyarrow = _pyarrow(path)
    with reading(str(path)), _table_errors(path, pyarrow):
        if path.suffix.lower() == ".parquet":
            yield from _parquet(path, text_column)
        else:
            with pyarrow.memory_map(str(path)) as source:
                yield from _arrow(pyarrow, source, path, text_column)


def _parquet(path: Path, text_column: str | None) -> Iterator[tuple[str, list[Any], float]]:
    from pyarrow import parquet

    with parquet.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False) as file:
        column = _column(file.schema_arrow, path, text_column)
        done, rows = 0, max(1, file.metadata.num_rows)
        for batch in file.iter_batches(_ROWS, columns=[column], use_threads=False):
            done += len(batch)
            yield column, _cells(batch.column(0)), min(1.0, done / rows)


def _arrow(pyarrow, source, path: Path, text_column: str | None) -> Iterator[tuple[str, list[Any], float]]:
    """Of the file format and of the stream format, which `save_to_disk` writes."""
    size = max(1, source.size())
    if source.read(6) == b"ARROW1":
        reader = pyarrow.ipc.open_file(source)
        count = reader.num_record_batches
        batches = ((reader.get_batch(i), (i + 1) / count) for i in range(count))
    else:
        source.seek(0)
        reader = pyarrow.ipc.open_stream(source)
        batches = ((batch, source.tell() / size) for batch in reader)
    column = _column(reader.schema, path, text_column)
    place = reader.schema.get_field_index(column)
    before = 0.0
    for batch, share in batches:
        cells = batch.column(place)
        for start in range(0, len(cells), _ROWS):
            read = min(1.0, (start + _ROWS) / len(cells))  # of the batch, which can be the whole file
            yield column, _cells(cells.slice(start, _ROWS)), before + read * (share - before)
        before = share


def _cells(values: Any) -> list[Any]:
    values.validate(full=True)  # offsets are numbers out of a file, and reads at them are not checked
    return values.to_pylist()


def _column(schema: Any, path: Path, text_column: str | None) -> str:
    """The name of the column with text. Raises DataError, with the names there are, if it isn't exactly one."""
    names = list(schema.names)
    found = [name for name in names if name in ((text_column,) if text_column else TEXT_COLUMNS)]
    if len(found) != 1:
        wanted = f"'{text_column}'" if text_column else "either 'text' or 'messages'"
        there = ", ".join(f"'{name}'" for name in names[:20]) or "none"
        raise DataError(f"{path} must have one column {wanted}; its columns are {there}", "--text-column NAME")
    return found[0]


@contextmanager
def _table_errors(path: Path, pyarrow) -> Iterator[None]:
    """What pyarrow makes of damaged files, as a DataError that names the file."""
    try:
        yield
    except DataError:
        raise
    except MemoryError as error:
        raise DataError(f"{path} asks for more memory than there is", "a complete copy of the file") from error
    except OSError as error:
        if error.errno is not None:  # of the disk
            raise
        raise DataError(f"{path} is damaged: {error}", "a complete copy of the file") from error
    except (pyarrow.ArrowException, ValueError, KeyError) as error:
        raise DataError(f"{path} is damaged: {error}", "a complete copy of the file") from error


def _pyarrow(path: Path):
    try:
        import pyarrow
    except ImportError:
        raise DataError(f"reading {path} needs pyarrow", "pip install 'mlxlm[data]'") from None
    return pyarrow
