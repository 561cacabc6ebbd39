"""Lines of JSON objects in files from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxlm.tokenizer.tokenizer import check_unicode
from mlxlm.utils.errors import GenerationError, MlxlmError
from mlxlm.utils.json_files import parse_json_object

_ANY = object()


class JsonLine:
    """The JSON object in a line, whose fields are checked as they are taken."""

    def __init__(self, where: str, values: Any):
        self._where, self._values = where, values
        if not isinstance(values, dict):
            raise self.error("is no JSON object")

    @classmethod
    def parsed(cls, path: Path, number: int, text: bytes) -> JsonLine:
        where = f"{path}: line {number}"
        hint = "a file that a chat was saved to" if number == 1 else "the file up to the line before"
        return cls(where, parse_json_object(text, where, GenerationError, hint))

    def inner(self, values: Any, name: str) -> JsonLine:
        """An object inside this one."""
        return JsonLine(f"{self._where}: {name}", values)

    def error(self, what: str, hint: str | None = None) -> GenerationError:
        return GenerationError(f"{self._where} {what}", hint)

    def get(self, name: str, kind: type, default: Any = _ANY) -> Any:
        """A field of this type; null or none at all is the default, if there is one."""
        value = self._values.get(name)
        if value is None and default is not _ANY:
            return default
        if type(value) is not kind:
            raise self.error(f"has the {name} {describe_value(value)}", f"a {_KINDS[kind]}")
        return value

    def text(self, name: str, default: Any = _ANY) -> str | None:
        """A field of text that a tokenizer can take."""
        value = self.get(name, str, default)
        with self.named():
            check_unicode(value or "")
        return value

    @contextmanager
    def named(self) -> Iterator[None]:
        """Errors of what is inside name this line."""
        try:
            yield
        except MlxlmError as error:
            if error.message.startswith(self._where):
                raise
            raise GenerationError(f"{self._where}: {error.message}", error.hint) from None


_KINDS = {int: "whole number", str: "text", list: "list", dict: "JSON object"}


def describe_value(value: Any) -> str:
    return "missing" if value is None else f"{value!r}"[:40]
