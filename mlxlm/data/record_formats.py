"""The formats of records, told apart by their fields, and the text or conversation that each becomes.

A record is a line of JSON lines, an element of a JSON array, or a row of a table.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from mlxlm.data.text import Document, split_pieces
from mlxlm.utils.errors import DataError, short_repr

Record = dict[str, Any]
Read = Callable[[Record, str], Document | None]  # gets a record and its location; None if it is empty
# Of OpenAI's older format and of other programs: they would change what is learned.
_REFUSED = {"functions": '"tools"', "function_call": '"tool_calls"', "chat_template_kwargs": "`chat_template`"}
_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool", "function_call": "assistant"}  # of ShareGPT
_PREFERENCE_HINT = '{"prompt": "...", "chosen": "...", "rejected": "..."}, with texts or messages'
_EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


@dataclass(frozen=True)
class RecordFormat:
    """A format of records.

    Attributes:
        name: What it is called.
        fields: Fields that every record of this format has.
        read: Makes a document of a record.
        optional_fields: Fields that are read if a record has them. Others are ignored.
    """

    name: str
    fields: tuple[str, ...]
    read: Read
    optional_fields: tuple[str, ...] = ()


def document_from_record(record: Any, location: str, text_column: str | None = None) -> Document | None:
    """Make a document of a record; None if it is empty.

    Args:
        record: A JSON value.
        location: The file with the line or row, for error messages.
        text_column: Field that has the text or the messages, whatever the record's format is.

    Raises:
        DataError: It is not an object, has no known format, or a field is wrong.
    """
    if not isinstance(record, dict):
        raise DataError(f"{location} is not a JSON object", ACCEPTED_RECORDS)
    given = {name: value for name, value in record.items() if value is not None}
    format = _recognize(given, text_column) or find_format(record, location, "fields", text_column)
    missing = [name for name in format.fields if name not in given]
    if len(missing) == len(format.fields):  # like an empty cell of a table
        return None
    if missing:
        raise DataError(f"{location}: '{missing[0]}' is null", "a text")
    document = format.read(given, location)
    if document is not None:
        document.format = format.name
    return document


def find_format(names: Collection[str], location: str, kind: str, text_column: str | None = None) -> RecordFormat:
    """Return the format of records with these fields: the first one in `FORMATS` whose fields are among them.

    Raises:
        DataError: There is none. The message has `location` and the names, called `kind`: "fields" or "columns".
    """
    if (format := _recognize(names, text_column)) is not None:
        return format
    shown = ", ".join(f"'{name[:40]}'" for name in itertools.islice(names, 20)) or "none"
    if text_column is not None:
        raise DataError(
            f"{location} has no '{text_column}'; its {kind} are {shown}", "`text_column=NAME`, one of these"
        )
    problem = f"{location} has no known format; its {kind} are {shown}"
    raise DataError(problem, f"{ACCEPTED_RECORDS}, or `text_column=NAME`")


def _recognize(names: Collection[str], text_column: str | None) -> RecordFormat | None:
    formats = FORMATS if text_column is None else (RecordFormat(text_column, (text_column,), _column(text_column)),)
    return next((format for format in formats if set(names).issuperset(format.fields)), None)


def _column(name: str) -> Read:
    """A reader of a field that has a text or messages."""

    def read(record: Record, location: str) -> Document | None:
        is_text = name != "messages" and not isinstance(record[name], list)
        return (_text if is_text else _messages)(name)(record, location)

    return read


def _text(field: str) -> Read:
    def read(record: Record, location: str) -> Document | None:
        text = _string(record[field], location, field)
        return Document(location, split_pieces(iter((text,)))) if text else None

    return read


def _messages(field: str) -> Read:
    def read(record: Record, location: str) -> Document | None:
        return _conversation(_list(record[field], field, location), record, location)

    return read


def _pair(question_field: str, answer_field: str, input_field: str | None = None) -> Read:
    """A reader of a question and its answer: two texts, or the messages before and from the first one to learn."""

    def read(record: Record, location: str) -> Document | None:
        question, answer = record[question_field], record[answer_field]
        if isinstance(question, list):
            before = [_message(message, location) | {"weight": 0} for message in question]
        else:
            texts = [_string(record.get(f) or "", location, f) for f in (question_field, input_field) if f is not None]
            before = [{"role": "user", "content": "\n\n".join([texts[0], *filter(None, texts[1:])])}]
        if not isinstance(answer, list):
            answer = [{"role": "assistant", "content": _string(answer, location, answer_field)}]
        return _conversation([*before, *answer], record, location)

    return read


def _labeled_pair(record: Record, location: str) -> Document | None:
    """A prompt and a completion with a label, as for KTO: whether the completion is desirable."""
    document = _pair("prompt", "completion")(record, location)
    if document is not None and isinstance(record["label"], bool):
        document.label = record["label"]
    return document


def _preference(record: Record, location: str) -> Document:
    """A chosen and a rejected answer to a prompt, or two conversations that begin alike."""
    prompt, documents = record.get("prompt"), []
    for field in ("chosen", "rejected"):
        answer = record[field]
        if isinstance(answer, str):
            if prompt is None:
                raise DataError(f"{location}: '{field}' is text without a 'prompt'", _PREFERENCE_HINT)
            answer = [{"role": "assistant", "content": answer}]
        answer = _list(answer, field, location)
        if isinstance(prompt, list):
            answer = prompt + answer
        elif prompt is not None and not any(isinstance(m, dict) and m.get("role") == "user" for m in answer[:2]):
            answer = [{"role": "user", "content": prompt}, *answer]  # else it is a whole conversation
        documents.append(_conversation(answer, record, location))
    chosen, rejected = documents
    if chosen is None or rejected is None:
        raise DataError(f"{location}: an answer has no messages", _PREFERENCE_HINT)
    chosen.rejected = rejected.messages
    return chosen


def _conversation(messages: list[Any], record: Record, location: str) -> Document | None:
    """A document of messages, with the system message and the tools of its record."""
    _refuse_fields(record, location)
    if record.get("system"):
        messages = [{"role": "system", "content": _string(record["system"], location, "system")}, *messages]
    checked = [_message(message, location) for message in messages]
    tools = _list(record.get("tools") or [], "tools", location)
    return Document(location, iter(()), checked, tools=tools) if checked else None


FORMATS = (
    RecordFormat("preference", ("chosen", "rejected"), _preference, ("prompt", "system", "tools")),
    RecordFormat("messages", ("messages",), _messages("messages"), ("tools",)),
    RecordFormat("conversations", ("conversations",), _messages("conversations"), ("system", "tools")),
    RecordFormat("labeled completion", ("prompt", "completion", "label"), _labeled_pair, ("system", "tools")),
    RecordFormat("prompt and completion", ("prompt", "completion"), _pair("prompt", "completion"), ("system", "tools")),
    RecordFormat(
        "Alpaca", ("instruction", "output"), _pair("instruction", "output", "input"), ("input", "system", "tools")
    ),
    RecordFormat("Dolly", ("instruction", "response"), _pair("instruction", "response", "context"), ("context",)),
    RecordFormat("question and answer", ("question", "answer"), _pair("question", "answer"), ("system",)),
    RecordFormat("text", ("text",), _text("text")),
)
_NAMES = [" and ".join(f'"{field}"' for field in format.fields) for format in FORMATS]
ACCEPTED_RECORDS = f"records with {', '.join(_NAMES[:-1])}, or {_NAMES[-1]}, such as {_EXAMPLE}"


def _message(message: Any, location: str) -> Record:
    """Check a message, and complete it: with a role, a content that is a text, and a weight."""
    if isinstance(message, dict) and {"from", "value"} <= message.keys() and "role" not in message:
        message = _from_sharegpt(message, location)
    if not isinstance(message, dict) or "role" not in message or not message.keys() & {"content", "tool_calls"}:
        hint = '{"role": "user", "content": "..."} or {"from": "human", "value": "..."}'
        raise DataError(f"{location}: a message must have 'role' and 'content'", hint)
    _refuse_fields(message, location)
    content, weight = message.get("content"), message.get("weight")
    if content is None and message.get("tool_calls"):
        content = ""
    if isinstance(content, list):
        content = "\n".join(_text_of_part(part, location) for part in content)
    if weight is None:
        weight = 1
    if isinstance(weight, bool) or weight not in (0, 1):
        raise DataError(f"{location}: 'weight' is {repr(weight)[:40]}", "0 or 1")
    role, content = _string(message["role"], location, "role"), _string(content, location, "content")
    return {**message, "role": role, "content": content, "weight": int(weight)}


def _from_sharegpt(message: Record, location: str) -> Record:
    role, content = _string(message["from"], location, "from"), message["value"]
    converted = {name: value for name, value in message.items() if name not in ("from", "value")}
    if role == "function_call":
        calls = content if isinstance(content, dict | list) else _parse(content, "value", location)
        calls = calls if isinstance(calls, list) else [calls]
        converted["tool_calls"], content = [{"type": "function", "function": call} for call in calls], ""
    return converted | {"role": _ROLES.get(role, role), "content": content}


def _text_of_part(part: Any, location: str) -> str:
    if not isinstance(part, dict) or part.get("type", "text") != "text":
        problem = f"{location}: a part of the content is {short_repr(part)}, not text"
        raise DataError(problem, '{"type": "text", "text": "..."}')
    return _string(part.get("text"), location, "text")


def _refuse_fields(values: Record, location: str) -> None:
    for field in (field for field in _REFUSED if values.get(field) is not None):
        raise DataError(f"{location}: '{field}' is not supported", _REFUSED[field])


def _list(value: Any, field: str, location: str) -> list[Any]:
    """Check a list, which can be JSON text, as in tables."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        value = _parse(value, field, location)
    if not isinstance(value, list):
        example = '{"type": "function", ...}' if field == "tools" else '{"role": "user", "content": "..."}'
        raise DataError(f"{location}: '{field}' is not a list", f"[{example}, ...]")
    return value


def _parse(value: Any, field: str, location: str) -> Any:
    try:
        return json.loads(_string(value, location, field))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{location}: '{field}' is not valid JSON: {error}") from None


def _string(value: Any, location: str, field: str) -> str:
    if not isinstance(value, str):
        hint = "text in all messages" if field == "content" else None
        raise DataError(f"{location}: '{field}' is not text but {type(value).__name__}", hint)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{location}: '{field}' has half of a surrogate pair at {error.start}") from error
    return value
