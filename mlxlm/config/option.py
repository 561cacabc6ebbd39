"""An option is declared once: a field of a settings class that says what a user may set it to, and what it does.

The range check of the class, the command line, the server's fields, the chat's `/set` and the tables of the docs follow
from the field. Nothing here imports MLX, so that `--help` is quick.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass
from typing import Any

from mlxlm.config.numbers import is_int, is_number

_KEY = "option"  # in the metadata of a field
_MAX_INT = 2**53 - 1  # exact in JSON
_MAX_FLOAT = 1e9  # far below the largest float32, because optimizers square


@dataclass(frozen=True)
class Option:
    """What is declared about an option in addition to its name, type and default.

    Attributes:
        help: One or two sentences, for `--help` and the docs.
        section: The heading that it is listed under. None: only Python can set it.
        common: Whether `--help` lists it; `--help-all` lists every option.
        low: The smallest number.
        high: The largest number.
        above: A number that it must exceed.
        below: A number that it must stay below.
        also: A number that is valid, too.
        choices: The texts or numbers that it can be.
        valid: What would work, for the error message. None: as the range, the choices or the type say.
        default_text: What happens by default, if that isn't the default value.
        names: All its names on the command line, such as "-t --temp --temperature". None: that of the field.
        metavar: What `--help` calls its value.
        max_items: How many items a list in a request may have.
        per_request: Whether only a single text can have it, so that a server has no default of it.
        generation_config: Whether a model's generation_config.json can set it.
    """

    help: str
    section: str | None = None
    common: bool = False
    low: float | None = None
    high: float | None = None
    above: float | None = None
    below: float | None = None
    also: float | None = None
    choices: tuple[Any, ...] = ()
    valid: str | None = None
    default_text: str | None = None
    names: str | None = None
    metavar: str | None = None
    max_items: int = 1024
    per_request: bool = False
    generation_config: bool = False

    def accepts_number(self, value: float) -> bool:
        """Whether a number is in the range."""
        if value == self.also:
            return True
        return (
            (self.low is None or value >= self.low)
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
            and (self.high is None or value <= self.high)
        )

    def range_text(self) -> str:
        """The range in words: "above 0 and at most 1"."""
        if self.low is not None:
            end = "up" if self.high is None else f"to {self.high:.15g}"
            return f"from {self.low:g} {end if self.below is None else f'to below {self.below:g}'}"
        if self.above is not None:
            return f"above {self.above:g}" + ("" if self.high is None else f" and at most {self.high:g}")
        return ""


def option(default: Any = MISSING, help: str = "", *, default_factory: Any = MISSING, **declared: Any) -> Any:
    """A field of a settings class that is an option. `declared`: the attributes of `Option`."""
    metadata = {_KEY: Option(help, **declared)}
    if default_factory is not MISSING:
        return dataclasses.field(default_factory=default_factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def options_of(settings: Any) -> dict[str, Field[Any]]:
    """The options of a settings class or object: {name: field}, in their order."""
    return {field.name: field for field in dataclasses.fields(settings) if _KEY in field.metadata}


def declaration(field: Field[Any]) -> Option:
    """What is declared about an option."""
    result: Option = field.metadata[_KEY]
    return result


def types_of(field: Field[Any]) -> list[str]:
    """The types of an option as they are written: ["int", "None"]."""
    return re.split(r" \| (?![^\[]*\])", str(field.type))


def non_default_fields(options: Any, defaults: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from those of `defaults`."""
    return {name: value for name, value in vars(options).items() if value != getattr(defaults, name)}


def default_text(field: Field[Any]) -> str | None:
    """The default in words; None if it is off, empty or required."""
    if (text := declaration(field).default_text) is not None:
        return text
    default = field.default
    return str(default) if is_number(default) or isinstance(default, str) and default else None


def valid_text(field: Field[Any]) -> str:
    """The values that an option can have, in words."""
    rules, types = declaration(field), types_of(field)
    if rules.valid is not None:
        return rules.valid
    if rules.choices:
        return f"one of {', '.join(map(str, rules.choices))}"
    if "bool" in types:
        return "true or false"
    if "float" in types or "int" in types:
        return f"a {'' if 'float' in types else 'whole '}number {rules.range_text()}".rstrip()
    return "text"


def range_problems(settings: Any) -> Iterator[str]:
    """Every option of a settings object whose value can't work, and what would: "top_p is 2, it must be ..."."""
    for name, field in options_of(settings).items():
        value = getattr(settings, name)
        if not _is_valid(field, value):
            yield f"{name} is {value!r}, it must be {valid_text(field)}"
        elif types_of(field)[0] == "tuple[str, ...]":
            yield from _text_problems(name, value)


def is_utf8(text: str) -> bool:
    """False for the lone surrogates that a shell makes of bytes that aren't UTF-8."""
    return text.encode("utf-8", "ignore").decode() == text


def _is_valid(field: Field[Any], value: Any) -> bool:
    rules, types = declaration(field), types_of(field)
    if value is None:
        return "None" in types
    if isinstance(value, bool):
        return "bool" in types
    if "float" in types and is_number(value) or "int" in types and is_int(value):
        if rules.choices:
            return value in rules.choices
        # Also excludes NaN.
        is_in_type = abs(value) <= (_MAX_FLOAT if "float" in types else rules.high or _MAX_INT)
        return is_in_type and rules.accepts_number(value)
    if isinstance(value, str) and "str" in types:
        return value in rules.choices if rules.choices else "Path" in types or is_utf8(value)
    return any(kind not in ("int", "float", "bool", "str", "None") for kind in types)  # checked by its class


def _text_problems(name: str, texts: tuple[Any, ...]) -> Iterator[str]:
    for text in texts:
        if not isinstance(text, str) or not text:
            yield f"{name} has {text!r}, it must be text of one character or more"
        elif not is_utf8(text):
            yield f"{name} has {text!r}, which UTF-8 can't encode"
        else:
            continue
        return
