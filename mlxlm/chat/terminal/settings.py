"""The settings that /set changes: generation options and the display."""

from __future__ import annotations

import shlex
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from mlxlm.chat.chat_template import PLAIN
from mlxlm.chat.reasoning import EFFORTS
from mlxlm.chat.session import Chat
from mlxlm.chat.terminal.screen import ReasoningDisplay
from mlxlm.config.option import options_of, types_of
from mlxlm.generation import GenerationOptions
from mlxlm.utils.errors import GenerationError

OverflowPolicy = Literal["ask", "stop", "drop"]
Markdown = Literal["auto", "on", "off"]
CHAT_SETTINGS = {
    "reasoning": get_args(ReasoningDisplay),
    "markdown": get_args(Markdown),
    "stats": ("on", "off"),
    "context_overflow": get_args(OverflowPolicy),
    "reasoning_effort": (*EFFORTS, "default"),
}
_OPTIONS = {name: field for name, field in options_of(GenerationOptions).items() if name != "logprobs"}  # not displayed
NAMES = (*CHAT_SETTINGS, *_OPTIONS)


@dataclass
class Settings:
    """Display settings.

    Attributes:
        reasoning: How reasoning is displayed.
        markdown: Whether to render Markdown; "auto" does with a chat template.
        stats: Whether to print statistics after each answer.
        ask_on_overflow: Ask whether to drop the oldest turns, instead of stopping, when the context is full.
    """

    reasoning: ReasoningDisplay = "dim"
    markdown: Markdown = "auto"
    stats: bool = False
    ask_on_overflow: bool = False

    def has_markdown(self, chat: Chat) -> bool:
        """Whether to render Markdown. A model without a template continues a text, whose line ends count."""
        return chat.chat_template != PLAIN if self.markdown == "auto" else self.markdown == "on"

    def overflow_policy(self, chat: Chat) -> OverflowPolicy:
        """What happens when the context is full."""
        return "ask" if self.ask_on_overflow and chat.context_overflow == "stop" else chat.context_overflow


def settings_text(settings: Settings, chat: Chat) -> dict[str, str]:
    """Return every setting as text."""
    values = {
        "reasoning": settings.reasoning,
        "markdown": settings.markdown,
        "stats": settings.stats,
        "context_overflow": settings.overflow_policy(chat),
        "reasoning_effort": chat.reasoning_effort or "default",
        **{name: getattr(chat.options, name) for name in _OPTIONS},
    }
    return {name: _format(value) for name, value in values.items()}


def set_setting(settings: Settings, chat: Chat, name: str, text: str) -> None:
    """Set one of `NAMES`, which may be abbreviated, from its text. "default" restores a generation option's default.

    Raises:
        GenerationError: The name or the value is invalid. Nothing changes.
    """
    name = setting_name(name)
    if name in CHAT_SETTINGS and text not in CHAT_SETTINGS[name]:
        raise GenerationError(f"{name} is {text!r}", " or ".join(CHAT_SETTINGS[name]))
    if name == "context_overflow":
        settings.ask_on_overflow, chat.context_overflow = text == "ask", "drop" if text == "drop" else "stop"
    elif name == "reasoning_effort":
        chat.reasoning_effort = None if text == "default" else text
    elif name in CHAT_SETTINGS:
        setattr(settings, name, text == "on" if name == "stats" else text)
    else:
        value = getattr(chat.defaults, name) if text == "default" else _parse(name, text)
        chat.options = replace(chat.options, **{name: value})


def resolve_abbreviation(name: str, names: Collection[str]) -> str | None:
    """Return the one of `names` that starts with `name`, or that others which do begin with; None if there is none.

    Raises:
        GenerationError: Several start with it.
    """
    matches = [candidate for candidate in names if candidate.startswith(name)]
    shortest = min(matches, key=len, default=None)
    if any(shortest and not match.startswith(shortest) for match in matches):
        raise GenerationError(f"{name} could be {', '.join(matches[:-1])} or {matches[-1]}", "more of its letters")
    return shortest


def setting_name(name: str) -> str:
    """Resolve an abbreviated name of `NAMES`. Raise GenerationError if none or several match."""
    match = resolve_abbreviation(name.replace("-", "_"), NAMES)
    if match is None:
        raise GenerationError(f"there is no setting {name}", ", ".join(NAMES))
    return match


def _parse(name: str, text: str) -> Any:
    """Parse the value of a generation option. Invalid text stays as it is, for GenerationOptions to report."""
    types = types_of(_OPTIONS[name])
    if "None" in types and text == "none":
        return None
    if types[0] == "bool":
        return {"on": True, "true": True, "off": False, "false": False}.get(text, text)
    if types[0].startswith(("tuple", "Mapping")):
        try:
            return tuple(part.replace("\\n", "\n").replace("\\t", "\t") for part in _split_words(text))
        except ValueError as error:
            raise GenerationError(f"{name} is {text!r}: {error}", "quotes that are closed") from None
    for number in (int, float) if types[0] in ("int", "float") else ():
        try:
            return number(text)
        except ValueError:
            continue
    return text


def _split_words(text: str) -> list[str]:
    """Split words and quoted texts. Raise ValueError for an unclosed quote."""
    words = shlex.shlex(text, posix=True)
    words.whitespace_split, words.escape, words.commenters = True, "", ""
    return list(words)


def _format(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, dict):
        value = tuple(f"{token}={bias}" for token, bias in value.items())
    if isinstance(value, tuple):
        return " ".join(shlex.quote(part).replace("\n", "\\n").replace("\t", "\\t") for part in value) or "none"
    return "none" if value is None else str(value)
