"""What /set changes: how answers are drawn, and how the chat looks."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from mlxlm.chat.chat_template import PLAIN
from mlxlm.chat.session import Chat
from mlxlm.chat.terminal.abbreviations import full_name
from mlxlm.chat.terminal.screen import Thinking
from mlxlm.generation import GenerationOptions
from mlxlm.utils.errors import GenerationError

Policy = Literal["ask", "stop", "drop"]
Markdown = Literal["auto", "on", "off"]
OWN = {
    "think": get_args(Thinking), "markdown": get_args(Markdown), "stats": ("on", "off"), "overflow": get_args(Policy),
}  # fmt: skip
_FIELDS = {field.name: field for field in fields(GenerationOptions) if field.name != "logprobs"}  # none are shown
NAMES = (*OWN, *_FIELDS)


@dataclass
class Settings:
    """How the chat looks: reasoning, Markdown ("auto": with a chat template), statistics after each answer. `asks`:
    where the context is full and the chat would stop, the person is asked to let it drop the oldest turns."""

    think: Thinking = "dim"
    markdown: Markdown = "auto"
    stats: bool = False
    asks: bool = False

    def has_markdown(self, chat: Chat) -> bool:
        """Whether answers are rendered. A model that just continues a text means its line ends."""
        return chat.template != PLAIN if self.markdown == "auto" else self.markdown == "on"

    def policy(self, chat: Chat) -> Policy:
        """What happens when the context is full."""
        return "ask" if self.asks and chat.overflow == "stop" else chat.overflow


def shown(settings: Settings, chat: Chat) -> dict[str, str]:
    """Every setting as text."""
    own = {"think": settings.think, "markdown": settings.markdown, "stats": settings.stats}
    values = {**own, "overflow": settings.policy(chat), **{name: getattr(chat.options, name) for name in _FIELDS}}
    return {name: _text(value) for name, value in values.items()}


def change(settings: Settings, chat: Chat, name: str, text: str) -> None:
    """Set one of NAMES, which may be shortened, from what a person typed; "default" is the default of an option of
    GenerationOptions.

    Raises GenerationError, and changes nothing, for a name that is none and a value that can't work.
    """
    name = named(name)
    if name in OWN and text not in OWN[name]:
        raise GenerationError(f"{name} is {text!r}", " or ".join(OWN[name]))
    if name == "overflow":
        settings.asks, chat.overflow = text == "ask", "drop" if text == "drop" else "stop"
    elif name in OWN:
        setattr(settings, name, text == "on" if name == "stats" else text)
    else:
        value = getattr(chat.defaults, name) if text == "default" else _parsed(name, text)
        chat.options = replace(chat.options, **{name: value})


def named(name: str) -> str:
    """The one of NAMES that a word is or abbreviates. Raises GenerationError if there is none or several."""
    if (found := full_name(name.replace("-", "_"), NAMES)) is None:
        raise GenerationError(f"there is no setting {name}", ", ".join(NAMES))
    return found


def _parsed(name: str, text: str) -> Any:
    """What `text` means for a field of GenerationOptions; what means nothing stays text, to be named as a problem."""
    kind = str(_FIELDS[name].type)
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
