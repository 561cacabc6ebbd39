"""Rows of JSON lines and arrays, CSV, and Parquet and Arrow files (with pyarrow, the extra "data"), as documents."""

from __future__ import annotations

import codecs
import csv
import io
import itertools
import json
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

from mlxlm.data.text import Advance, Document, Row, invalid_utf8, raise_error, reading, split_pieces
from mlxlm.utils.errors import DataError

TEXT_COLUMNS = ("text", "messages")  # that are read by default
MAX_ROW_BYTES = 1 << 28  # of a line: it is in memory as a whole, and a file may have no line ends
# Of OpenAI's older format and of other programs: they would change what is learned.
_REFUSED = {"functions": '"tools"', "function_call": '"tool_calls"', "chat_template_kwargs": "`chat_template`"}
_EXAMPLE = 'rows such as {"text": "..."} or {"messages": [{"role": "user", "content": "..."}, ...]}'
# A question and its answer, in the formats of prompt and completion and of Alpaca.
_PREFERENCE_HINT = '{"prompt": "...", "chosen": "...", "rejected": "..."}, with texts or messages'
_PAIRS = (("prompt", "completion"), ("instruction", "output"))


def json_rows(stream: IO[bytes], name: str, text_column: str | None) -> Iterator[Row]:
    """Yield a row for each line of JSON that isn't blank, or for each element of one JSON array."""
    offset = number = 0
    is_first = True
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
        elif is_first and line.lstrip().startswith(b"["):
            yield from _array_rows(line + stream.read(MAX_ROW_BYTES), name, text_column)
            return
        elif line.strip():
            is_first = False
            yield partial(_json_document, line, location, offset, text_column)
        offset += size


def _array_rows(content: bytes, name: str, text_column: str | None) -> Iterator[Row]:
    if len(content) > MAX_ROW_BYTES:
        raise DataError(f"{name} is a JSON array of more than {MAX_ROW_BYTES} bytes", "jq -c '.[]', for JSON lines")
    for number, row in enumerate(_parse(content, name, 0), start=1):
        yield partial(_row_document, row, f"{name}, row {number}", text_column)


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
        is_pair = text_column is None and not set(TEXT_COLUMNS) & set(header) and _pair(header)
        columns = header if is_pair else [find_text_column(header, name, text_column)]
        for number, row in enumerate(rows, start=1):
            cells = dict(zip(header, row, strict=False))
            cells = {column: cells[column] for column in columns if column in cells}
            yield partial(_csv_document, cells, f"{name}, row {number}", text_column)
    except csv.Error as error:
        raise DataError(f"{name} is damaged after row {number}: {error}", "a table with quoted cells") from error


def _csv_document(cells: dict[str, str], location: str, text_column: str | None) -> Document | None:
    _check_utf8("".join(cells.values()), location)
    return _row_document(cells, location, text_column) if cells else None


def _check_utf8(text: str, location: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise DataError(f"{location} is not UTF-8 text", "iconv, which converts other encodings") from None


def find_text_column(names: Sequence[str], table: str, text_column: str | None) -> str:
    """The name of the column with text. Raises DataError, with the names of all columns, if there isn't exactly one."""
    matches = [name for name in names if name in ((text_column,) if text_column else TEXT_COLUMNS)]
    if len(matches) != 1:
        expected = f"'{text_column}'" if text_column else "either 'text' or 'messages'"
        hint = "the same rows as .jsonl" if text_column is None and _pair(names) else "`text_column=NAME`"
        raise DataError(f"{table} must have one column {expected}; its columns are {_listed(names)}", hint)
    if matches == ["messages"] and "tools" in names:
        raise DataError(f"{table} has a column 'tools', which is only read from JSON lines", "the same rows as .jsonl")
    return matches[0]


def _listed(names: Collection[str]) -> str:
    return ", ".join(f"'{name[:40]}'" for name in itertools.islice(names, 20)) or "none"


def _pair(names: Collection[str]) -> tuple[str, str] | None:
    """The names of a question and its answer that are among `names`."""
    return next((pair for pair in _PAIRS if set(pair) <= set(names)), None)


def _pair_messages(row: dict[str, Any], pair: tuple[str, str]) -> list[Any]:
    question, answer = (row[name] for name in pair)
    if isinstance(question, list) and isinstance(answer, list):
        return question + answer
    if isinstance(question, str) and pair[0] == "instruction" and isinstance(row.get("input"), str) and row["input"]:
        question = f"{question}\n\n{row['input']}"
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return [*system, {"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _json_document(line: bytes, location: str, offset: int, text_column: str | None) -> Document | None:
    return _row_document(_parse(line, location, offset), location, text_column)


def _row_document(row: Any, location: str, text_column: str | None) -> Document | None:
    if not isinstance(row, dict):
        raise DataError(f"{location} must have either 'text' or 'messages': it is not a JSON object", _EXAMPLE)
    if text_column is None and not row.keys() & set(TEXT_COLUMNS):
        if {"chosen", "rejected"} <= row.keys():
            return _preference(row, location)
        if pair := _pair(row):
            row = {**row, "messages": _pair_messages(row, pair)}
    keys = row.keys() & ({text_column} if text_column else set(TEXT_COLUMNS))
    if keys and all(row[key] is None for key in keys):  # like an empty cell of a table
        return None
    keys = {key for key in keys if row[key] is not None}
    if len(keys) != 1:
        expected = f"'{text_column}'" if text_column else "either 'text' or 'messages'"
        problem = f"{location} must have {expected}; its fields are {_listed(row)}"
        raise DataError(problem, f"{_EXAMPLE}, or `text_column=NAME`")
    [key] = keys
    document = document_from_cell(row[key], key, location)
    if document is not None and document.messages is not None:
        _refuse_fields(row, location)
        document.tools = _list(row.get("tools") or [], "tools", location)
        document.label = row["label"] if isinstance(row.get("label"), bool) else None
    return document


def _preference(row: dict[str, Any], location: str) -> Document:
    """A chosen and a rejected answer to a prompt, or two conversations that begin alike."""
    prompt, conversations = row.get("prompt"), []
    for field in ("chosen", "rejected"):
        answer = row[field]
        if isinstance(answer, str):
            if prompt is None:
                raise DataError(f"{location}: '{field}' is text without a 'prompt'", _PREFERENCE_HINT)
            answer = [{"role": "assistant", "content": answer}]
        answer = _list(answer, field, location)
        if isinstance(prompt, list):
            answer = prompt + answer
        elif prompt is not None and not any(isinstance(m, dict) and m.get("role") == "user" for m in answer[:2]):
            answer = [{"role": "user", "content": prompt}, *answer]  # else it is a whole conversation
        system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
        conversations.append([_message(message, location) for message in system + answer])
    _refuse_fields(row, location)
    tools = _list(row.get("tools") or [], "tools", location)
    return Document(location, iter(()), conversations[0], tools=tools, rejected=conversations[1])


def document_from_cell(value: Any, column: str, location: str) -> Document | None:
    """The document in a cell: a text or a list of messages; None if it has no text or is null.

    Raises:
        DataError: The value is neither; the message names `location`.
    """
    if value is None:
        return None
    if column == "messages" or column != "text" and isinstance(value, list):
        messages = [_message(message, location) for message in _list(value, "messages", location)]
        return Document(location, iter(()), messages) if messages else None
    text = _string(value, location, column)
    return Document(location, split_pieces(iter((text,)))) if text else None


def _parse(content: bytes, location: str, offset: int) -> Any:
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise invalid_utf8(location, offset + error.start, f"0x{content[error.start]:02X}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{location} is not valid JSON: {error}", _EXAMPLE) from error


def _list(value: Any, field: str, location: str) -> list[Any]:
    if not isinstance(value, list):
        example = '{"role": "user", "content": "..."}' if field == "messages" else '{"type": "function", ...}'
        raise DataError(f"{location}: '{field}' is not a list", f"[{example}, ...]")
    return value


def _message(message: Any, location: str) -> dict[str, Any]:
    """Check a message, and complete its content and its weight."""
    if not isinstance(message, dict) or "role" not in message or not message.keys() & {"content", "tool_calls"}:
        raise DataError(f"{location}: a message must have 'role' and 'content'")
    _refuse_fields(message, location)
    content, weight = message.get("content"), message.get("weight")
    if content is None and message.get("tool_calls"):
        content = ""
    if weight is None:
        weight = 1
    if isinstance(weight, bool) or weight not in (0, 1):
        raise DataError(f"{location}: 'weight' is {repr(weight)[:40]}", "0 or 1")
    role, content = _string(message["role"], location, "role"), _string(content, location, "content")
    return {**message, "role": role, "content": content, "weight": int(weight)}


def _refuse_fields(values: dict[str, Any], location: str) -> None:
    for field in (field for field in _REFUSED if values.get(field) is not None):
        raise DataError(f"{location}: '{field}' is not supported", _REFUSED[field])


def _string(value: Any, location: str, field: str) -> str:
    if not isinstance(value, str):
        hint = "text in all messages" if field == "content" else None
        raise DataError(f"{location}: '{field}' is not text but {type(value).__name__}", hint)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{location}: '{field}' has half of a surrogate pair at {error.start}") from error
    return value


TABLE_SUFFIXES = (".parquet", ".arrow")
_ROWS = 64  # converted to Python objects at a time: documents can be long
_BUFFER_BYTES = 1 << 20  # of a Parquet column that are read at a time


def table_rows(path: Path, advance: Advance, text_column: str | None) -> Iterator[Row]:
    """Yield the rows of a Parquet or Arrow file.

    Memory: one page of one column (Parquet), or a memory-mapped batch of rows (Arrow).
    """
    reported, numbers = 0, itertools.count(1)
    with reading(str(path)):
        if (size := path.stat().st_size) == 0:
            return
        for column, values, share in _columns(path, text_column):
            for value in values:
                yield partial(document_from_cell, value, column, f"{path}, row {next(numbers)}")
            done = int(share * size)
            advance(done - reported)
            reported = done
    advance(size - reported)


def _columns(path: Path, text_column: str | None) -> Iterator[tuple[str, list[Any], float]]:
    """Yield the column's name, cells of some rows, and the fraction of the file read so far."""
    try:
        import pyarrow
    except ImportError:
        raise DataError(f"reading {path} needs pyarrow", "pip install 'mlxlm[data]'") from None
    try:
        if path.suffix.lower() == ".parquet":
            yield from _parquet(path, text_column)
        else:
            with pyarrow.memory_map(str(path)) as source:
                yield from _arrow(pyarrow, source, path, text_column)
    except (pyarrow.ArrowException, OSError, MemoryError, ValueError, KeyError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # a disk error
            raise
        raise DataError(f"{path} is damaged: {error}", "a complete copy of the file") from error


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
