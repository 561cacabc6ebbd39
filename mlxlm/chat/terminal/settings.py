"""What /set changes: how answers are drawn, and how the chat looks."""

from __future__ import annotations

import re
import shlex
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal, get_args

from mlxlm.chat.session import Chat
from mlxlm.chat.terminal.screen import Thinking
from mlxlm.errors import GenerationError
from mlxlm.generation import GenerationOptions

Policy = Literal["ask", "stop", "drop"]
OWN = {
    "think": get_args(Thinking), "markdown": ("on", "off"), "stats": ("on", "off"), "overflow": get_args(Policy),
}  # fmt: skip
_FIELDS = {field.name: field for field in fields(GenerationOptions)}
NAMES = (*OWN, *_FIELDS)


@dataclass
class Settings:
    """How the chat looks: reasoning, Markdown, statistics after each answer; and what happens when the context is
    full: "ask" the person, "stop", or "drop" the oldest turns."""

    think: Thinking = "dim"
    markdown: bool = True
    stats: bool = False
    overflow: Policy = "stop"


def shown(settings: Settings, chat: Chat) -> dict[str, str]:
    """Every setting as text."""
    return {name: _text(getattr(settings, name)) for name in OWN} | {
        name: _text(getattr(chat.options, name)) for name in _FIELDS
    }


def change(settings: Settings, chat: Chat, name: str, text: str) -> None:
    """Set one of NAMES from what a person typed; "default" is its default.

    Raises GenerationError, and changes nothing, for a name that is none and a value that can't work.
    """
    name = name.replace("-", "_")
    if name in OWN:
        if text not in OWN[name]:
            raise GenerationError(f"{name} is {text!r}", " or ".join(OWN[name]))
        setattr(settings, name, text == "on" if OWN[name] == ("on", "off") else text)
        if name == "overflow":
            chat.overflow = "drop" if text == "drop" else "stop"
    elif name in _FIELDS:
        chat.options = replace(chat.options, **{name: _parsed(name, text)})
    else:
        raise GenerationError(f"there is no setting {name}", ", ".join(NAMES))


def _parsed(name: str, text: str) -> Any:
    """What `text` means for a field of GenerationOptions; what means nothing stays text, to be named as a problem."""
    field = _FIELDS[name]
    kind = str(field.type)
    if text == "default":
        return field.default if field.default is not MISSING else field.default_factory()
    if "None" in kind and text == "none":
        return None
    if kind.startswith(("tuple", "Mapping")):
        try:
            return tuple(part.replace("\\n", "\n").replace("\\t", "\t") for part in _words(text))
        except ValueError as error:
            raise GenerationError(f"{name} is {text!r}: {error}", "quotes that are closed") from None
    for number in (int, float) if re.match(r"int|float", kind) else ():
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _words(text: str) -> list[str]:
    """Words and quoted texts. Raises ValueError for a quote that isn't closed."""
    words = shlex.shlex(text, posix=True)
    words.whitespace_split, words.escape, words.commenters = True, "", ""
    return list(words)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        value = tuple(f"{token}={bias}" for token, bias in value.items())
    if isinstance(value, tuple):
        return " ".join(shlex.quote(part).replace("\n", "\\n").replace("\t", "\\t") for part in value) or "none"
    return "none" if value is None else str(value)
