"""Rows of data, from JSON lines or tables, as documents."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import IO, Any

from mlxlm.data.bad_input import OnBad
from mlxlm.data.text import Document, not_text, pieces_of
from mlxlm.utils.errors import DataError

COLUMNS = ("text", "messages")  # where text is looked for
LONGEST_ROW = 1 << 28  # bytes of a line: it is held whole, and a file without line ends may be of any size
_EXAMPLE = 'rows such as {"text": "..."} or {"messages": [{"role": "user", "content": "..."}, ...]}'


def json_documents(
    stream: IO[bytes], name: str, named: bool, text_column: str | None, on_bad: OnBad
) -> Iterator[Document]:
    """A document for each line of JSON; `named`: a stream without any is an error; `on_bad` is called with the error of
    each line that has none, which is left out. See `documents` of data.sources."""
    empty = True
    offset = number = 0
    while line := stream.readline(LONGEST_ROW + 1):
        number += 1
        size, where = len(line), f"{name}, line {number}"
        if size > LONGEST_ROW:
            on_bad(DataError(f"{where} is longer than {LONGEST_ROW} bytes", "one object on each line"))
            while not line.endswith(b"\n") and (line := stream.readline(LONGEST_ROW)):
                size += len(line)
            line = b""
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if size > LONGEST_ROW or line.strip():
            empty = False
        if line.strip():
            try:
                document = _document(line, where, offset, text_column)
            except DataError as error:
                on_bad(error)
            else:
                if document is not None:
                    yield document
        offset += size
    if empty and named:
        raise DataError(f"{name} is empty", _EXAMPLE)


def _document(line: bytes, where: str, offset: int, text_column: str | None) -> Document | None:
    row = _parsed(line, where, offset)
    found = row.keys() & ({text_column} if text_column else set(COLUMNS))
    if found and all(row[key] is None for key in found):  # as the empty cells of tables
        return None
    found = {key for key in found if row[key] is not None}
    if len(found) != 1:
        raise DataError(f"{where} must have {_wanted(text_column)}", f"{_EXAMPLE}, or --text-column NAME")
    [key] = found
    return document_of(row[key], key, where)


def document_of(value: Any, column: str, where: str) -> Document | None:
    """The document in a column of a row, a text or a list of messages; None if it has no text.

    Raises DataError, naming `where`, for what is neither.
    """
    if column == "messages" or column != "text" and isinstance(value, list):
        messages = [_message(message, where) for message in _list(value, where)]
        return Document(where, iter(()), messages) if messages else None
    text = _string(value, where, column)
    return Document(where, pieces_of(iter((text,)))) if text else None


def _wanted(text_column: str | None) -> str:
    return f"'{text_column}'" if text_column else "either 'text' or 'messages'"


def _parsed(line: bytes, where: str, offset: int) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise not_text(where, offset + error.start, f"0x{line[error.start]:02X}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON: {error}", _EXAMPLE) from error
    if not isinstance(row, dict):
        raise DataError(f"{where} must have either 'text' or 'messages': it is no JSON object", _EXAMPLE)
    return row


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
        hint = "text in all messages, and no calls of tools" if field == "content" else None
        raise DataError(f"{where}: '{field}' is not text but {type(value).__name__}", hint)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: '{field}' has half of a surrogate pair at {error.start}") from error
    return value
