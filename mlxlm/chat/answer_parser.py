"""Splits a generated answer into its parts: reasoning, text and tool calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from mlxlm.chat.harmony import HarmonyParser
from mlxlm.chat.messages import Tool
from mlxlm.chat.reasoning import HARMONY, ReasoningParser, ReasoningTags
from mlxlm.chat.tool_call_parser import ReasoningDelta, TextDelta, ToolCallParser, ToolCallStart, ToolEvent
from mlxlm.chat.tool_calls import ToolFormat
from mlxlm.generation import FinishReason

Kind = Literal["reasoning", "text", "call"]


@dataclass(eq=False)
class Part:
    """A part of an answer.

    Attributes:
        kind: What it is; "call" for the arguments of a tool call.
        text: What there is of it so far.
        call_id: The id of the call.
        name: The function that is called.
    """

    kind: Kind
    text: str = ""
    call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Piece:
    """What a chunk adds to a part.

    Attributes:
        part: The part, with this piece.
        text: The piece; "" at the beginning of a call, and for an empty text.
        is_first: Whether the part begins with this piece.
    """

    part: Part
    text: str
    is_first: bool


class AnswerParser:
    """Splits a streamed answer into parts. Text that could be part of a tag or a call is held back until it is decided.

    If the template begins the answer, such as with "<think>", push that first.

    Attributes:
        parts: The parts so far.
    """

    def __init__(
        self, tool_format: ToolFormat | None = None, tags: ReasoningTags | None = None, tools: Sequence[Tool] = ()
    ):
        """Parse an answer.

        Args:
            tool_format: The markup of tool calls; None for an answer without calls.
            tags: The markup of reasoning; None for an answer without reasoning.
            tools: The functions that can be called, for the types of their arguments.
        """
        self.parts: list[Part] = []
        self._harmony = HarmonyParser(tool_format is not None) if tags is HARMONY else None
        self._reasoning = None if tags is None or tags is HARMONY else ReasoningParser(tags)
        self._calls = ToolCallParser(tool_format, tools) if tool_format is not None and tags is not HARMONY else None

    @property
    def in_reasoning(self) -> bool:
        """Whether what follows is reasoning."""
        parser = self._harmony or self._reasoning
        return parser is not None and parser.reasoning

    @property
    def calls(self) -> list[Part]:
        """The tool calls so far; the arguments of the last one can be incomplete."""
        return [part for part in self.parts if part.kind == "call"]

    def text(self, kind: Kind) -> str:
        """The text of all parts of a kind so far."""
        return "".join(part.text for part in self.parts if part.kind == kind)

    def push(self, text: str, finish_reason: FinishReason | None = None) -> list[Piece]:
        """Add text, and return what is decided: everything, if there is a reason why the answer ends."""
        if self._harmony is not None:
            events = self._harmony.push(text)
            return list(self._add_events(events if finish_reason is None else events + self._harmony.finish()))
        pieces: list[Piece] = []
        for part, is_reasoning in self._split_reasoning(text, finish_reason is not None):
            if self._calls is None or is_reasoning:
                pieces += self._add("reasoning" if is_reasoning else "text", part)
            else:
                pieces += self._add_events(self._calls.push(part))
        if finish_reason is not None and self._calls is not None:
            pieces += self._add_events(self._calls.finish(cut_off=finish_reason not in ("eos", "stop")))
        return pieces

    def _split_reasoning(self, text: str, ended: bool) -> list[tuple[str, bool]]:
        if self._reasoning is None:
            return [(text, False)]
        pieces = self._reasoning.push(text)
        return pieces + self._reasoning.finish() if ended else pieces

    def _add_events(self, events: Sequence[ToolEvent]) -> Iterator[Piece]:
        for event in events:
            if isinstance(event, TextDelta):
                yield from self._add("text", event.text)
            elif isinstance(event, ReasoningDelta):
                yield from self._add("reasoning", event.text)
            elif isinstance(event, ToolCallStart):
                self.parts.append(Part("call", "", event.id, event.name))
                yield Piece(self.parts[-1], "", True)
            else:
                yield from self._add("call", event.text)

    def _add(self, kind: Kind, text: str) -> Iterator[Piece]:
        if text:
            is_first = not self.parts or self.parts[-1].kind != kind
            if is_first:
                self.parts.append(Part(kind))
            self.parts[-1].text += text
            yield Piece(self.parts[-1], text, is_first)
