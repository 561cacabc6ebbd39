"""OpenAI's harmony format, in which GPT-OSS answers: messages with a channel and, if they call a tool, a recipient.

    <|channel|>analysis<|message|>REASONING<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>

without the line feed, or at the end `<|start|>assistant<|channel|>final<|message|>ANSWER<|return|>`. The prompt ends
with `<|start|>assistant`. The recipient can also come before the channel.
"""

from __future__ import annotations

import re
from typing import Literal

from mlxlm.chat.reasoning import partial_length
from mlxlm.chat.tool_calls import ArgumentsDelta, ReasoningDelta, TextDelta, ToolCallStart, ToolEvent, new_call_id

CALL = "<|call|>"  # ends an answer with a call
_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", CALL, "<|return|>")
_TOKEN = re.compile("|".join(map(re.escape, _TOKENS)))
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([\w.-]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")


class HarmonyParser:
    """Splits a streamed answer, however it is split into chunks.

    The channel analysis is reasoning, all others are text: commentary is also for the user. An answer without a header
    is text. Messages of one kind are paragraphs.
    """

    def __init__(self, has_tools: bool):
        """Parse an answer. Without tools, calls of those that the model knows from its training are reasoning."""
        self._has_tools = has_tools
        self._pending = ""
        self._header: str | None = ""  # the header so far, in which the answer begins; None in a message's text
        self._kind: Literal["reasoning", "text", "call"] = "text"
        self._kinds: set[str] = set()  # of messages with text so far
        self._is_first = True  # whether this is the first part of a message's text

    @property
    def reasoning(self) -> bool:
        """Whether the parser is inside reasoning."""
        return self._header is None and self._kind == "reasoning"

    def push(self, text: str) -> list[ToolEvent]:
        """Add text and return what is decided."""
        self._pending += text
        events: list[ToolEvent] = []
        while token := _TOKEN.search(self._pending):
            self._add(self._pending[: token.start()], events)
            self._pending = self._pending[token.end() :]
            self._add_token(token[0], events)
        decided = len(self._pending) - partial_length(self._pending, *_TOKENS)
        self._add(self._pending[:decided], events)
        self._pending = self._pending[decided:]
        return events

    def finish(self) -> list[ToolEvent]:
        """Return the text that was held back, when no more text comes. A header that isn't complete is left out."""
        events: list[ToolEvent] = []
        if self._header is not None and not _is_header(self._header + self._pending, whole=True):
            self._start_text(self._header, events)
        self._add(self._pending, events)
        self._pending = ""
        return events

    def _add(self, text: str, events: list[ToolEvent]) -> None:
        if self._header is not None:
            self._header += text
            if not _is_header(self._header):
                self._start_text(self._header, events)
        elif text:
            if self._kind == "call":
                events.append(ArgumentsDelta(text))
            else:
                text = "\n\n" * (self._is_first and self._kind in self._kinds) + text
                events.append(TextDelta(text) if self._kind == "text" else ReasoningDelta(text))
                self._kinds.add(self._kind)
            self._is_first = False

    def _start_text(self, text: str, events: list[ToolEvent]) -> None:
        self._header, self._is_first = None, True
        self._add(text, events)

    def _add_token(self, token: str, events: list[ToolEvent]) -> None:
        if self._header and self._header.strip() and not _is_header(self._header, whole=True):
            self._start_text(self._header, events)
        if token != "<|message|>":
            self._header = token if token == "<|start|>" else (self._header or "") + token
            return
        header, self._header, self._is_first = self._header or "", None, True
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        self._kind = "text"
        if recipient is not None and self._has_tools:
            self._kind = "call"
            events.append(ToolCallStart(new_call_id(), recipient[1]))
        elif recipient is not None or channel is not None and channel[1] == "analysis":
            self._kind = "reasoning"


def _is_header(text: str, whole: bool = False) -> bool:
    """Whether a text begins a header, with a token or a recipient. A text that isn't `whole` may become one."""
    text = text.lstrip()
    return text.startswith((*_TOKENS, "to=")) or not whole and "to=".startswith(text)
