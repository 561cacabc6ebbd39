"""What /set changes: how answers are drawn, and how the chat looks."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from mlxlm.chat.chat_template import PLAIN
from mlxlm.chat.session import Chat
from mlxlm.chat.terminal.abbreviations import resolve_abbreviation
from mlxlm.chat.terminal.screen import ReasoningDisplay
from mlxlm.generation import GenerationOptions
from mlxlm.utils.errors import GenerationError

OverflowPolicy = Literal["ask", "stop", "drop"]
Markdown = Literal["auto", "on", "off"]
CHAT_SETTINGS = {
    "reasoning": get_args(ReasoningDisplay),
    "markdown": get_args(Markdown),
    "stats": ("on", "off"),
    "context_overflow": get_args(OverflowPolicy),
}
_FIELDS = {field.name: field for field in fields(GenerationOptions) if field.name != "logprobs"}  # none are shown
NAMES = (*CHAT_SETTINGS, *_FIELDS)


@dataclass
class Settings:
    """How the chat looks: reasoning, Markdown ("auto": with a chat template), statistics after each answer. `ask_on_overflow`:
    where the context is full and the chat would stop, the person is asked to let it drop the oldest turns."""

    reasoning: ReasoningDisplay = "dim"
    markdown: Markdown = "auto"
    stats: bool = False
    ask_on_overflow: bool = False

    def has_markdown(self, chat: Chat) -> bool:
        """Whether answers are rendered. A model that just continues a text means its line ends."""
        return chat.chat_template != PLAIN if self.markdown == "auto" else self.markdown == "on"

    def overflow_policy(self, chat: Chat) -> OverflowPolicy:
        """What happens when the context is full."""
        return "ask" if self.ask_on_overflow and chat.context_overflow == "stop" else chat.context_overflow


def settings_text(settings: Settings, chat: Chat) -> dict[str, str]:
    """Every setting as text."""
    own = {"reasoning": settings.reasoning, "markdown": settings.markdown, "stats": settings.stats}
    values = {
        **own,
        "context_overflow": settings.overflow_policy(chat),
        **{name: getattr(chat.options, name) for name in _FIELDS},
    }
    return {name: _text(value) for name, value in values.items()}


def set_setting(settings: Settings, chat: Chat, name: str, text: str) -> None:
    """Set one of NAMES, which may be shortened, from what a person typed; "default" is the default of an option of
    GenerationOptions.

    Raises GenerationError, and changes nothing, for a name that is none and a value that can't work.
    """
    name = named(name)
    if name in CHAT_SETTINGS and text not in CHAT_SETTINGS[name]:
        raise GenerationError(f"{name} is {text!r}", " or ".join(CHAT_SETTINGS[name]))
    if name == "context_overflow":
        settings.ask_on_overflow, chat.context_overflow = text == "ask", "drop" if text == "drop" else "stop"
    elif name in CHAT_SETTINGS:
        setattr(settings, name, text == "on" if name == "stats" else text)
    else:
        value = getattr(chat.defaults, name) if text == "default" else _parsed(name, text)
        chat.options = replace(chat.options, **{name: value})


def named(name: str) -> str:
    """The one of NAMES that a word is or abbreviates. Raises GenerationError if there is none or several."""
    if (found := resolve_abbreviation(name.replace("-", "_"), NAMES)) is None:
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
