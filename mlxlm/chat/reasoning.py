"""Reasoning that a model writes before its answer, such as between <think> and </think>."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from mlxlm.utils.errors import GenerationError


@dataclass(frozen=True)
class ReasoningTags:
    """What a model writes around its reasoning.

    Attributes:
        open: The text before it.
        close: The text between it and the answer.
        answer: The text before an answer without reasoning.
    """

    open: str
    close: str
    answer: str = ""

    def open_tag(self, prompt: str) -> str:
        """Return the tag and whitespace at the end of `prompt` if the template opens the block itself, else ""."""
        match = re.search(rf"{re.escape(self.open)}\s*\Z", prompt)
        return match[0] if match else ""

    def start_of_answer(self, prefix: str) -> str:
        """Return what begins an answer without reasoning, after a prompt that ends with the tag `prefix` or with ""."""
        if self.answer:
            return "" if prefix else self.answer
        return f"\n{self.close}\n\n" if prefix else ""

    def render(self, reasoning: str, answer: str) -> str:
        """Return reasoning, which has ended, and an answer as a model writes them."""
        return self.open + reasoning + self.close + answer if reasoning else answer and self.answer + answer


# In conversations, the reasoning in an answer has these tags, whatever the model writes.
THINK = ReasoningTags("<think>", "</think>")
# OpenAI's harmony format (GPT-OSS), in which reasoning and answer are messages of their own.
HARMONY = ReasoningTags(
    "<|channel|>analysis<|message|>",
    "<|end|><|start|>assistant<|channel|>final<|message|>",
    "<|channel|>final<|message|>",
)
_ALL_TAGS = (
    HARMONY,
    ReasoningTags("[THINK]", "[/THINK]"),  # Mistral
    ReasoningTags("<|channel>thought", "<channel|>"),  # Gemma 4
    ReasoningTags("<seed:think>", "</seed:think>"),
    THINK,
)
EFFORTS = ("none", "low", "medium", "high")


def check_effort(effort: str | None) -> str | None:
    """Return `effort`, which may be None. Raise GenerationError if it is not a reasoning effort."""
    if effort not in (None, *EFFORTS):
        raise GenerationError(f"reasoning_effort is {effort!r}", " or ".join(EFFORTS))
    return effort


def effort_variables(effort: str | None) -> dict[str, Any]:
    """Return the variables of chat templates for a reasoning effort, None for the model's default."""
    return {"reasoning_effort": effort, "enable_thinking": effort != "none"} if effort else {}


def reasoning_tags(template: str) -> ReasoningTags | None:
    """Return the tags that occur in a chat template, if any."""
    return next((tags for tags in _ALL_TAGS if tags.open in template), None)


def split(text: str) -> tuple[str, str]:
    """Return the reasoning and the answer of a complete text with the tags <think> and </think>."""
    parser = ReasoningParser()
    pieces = [*parser.push(text), *parser.finish()]
    return "".join(t for t, reasoning in pieces if reasoning), "".join(t for t, reasoning in pieces if not reasoning)


class ReasoningParser:
    """Separates reasoning from the answer in a streamed text, however it is split into chunks.

    `push` and `finish` return `(text, is_reasoning)` pairs without the tags and the whitespace around them. Text that
    could be part of a tag is held back until that is decided. Only a block at the start counts, since an answer may
    mention the tags; a block that is never closed is all reasoning. If the template opens the block itself, push its
    opening tag first.
    """

    def __init__(self, tags: ReasoningTags = THINK):
        self._tags = tags
        self._state: Literal["start", "reasoning", "gap", "answer"] = "start"
        self._pending = ""
        self._has_reasoning = False  # whitespace before the first reasoning is dropped

    @property
    def reasoning(self) -> bool:
        """Whether the parser is inside the block."""
        return self._state == "reasoning"

    def push(self, text: str) -> list[tuple[str, bool]]:
        """Add text and return the pairs that are decided."""
        self._pending += text
        pieces: list[tuple[str, bool]] = []
        if self._state == "start":
            self._parse_start()
        if self.reasoning:
            pieces += self._parse_reasoning()
        if self._state == "gap":
            self._pending = self._pending.lstrip()
            self._state = "answer" if self._pending else "gap"
        if self._state == "answer" and self._pending:
            pieces.append((self._pending, False))
            self._pending = ""
        return pieces

    def finish(self) -> list[tuple[str, bool]]:
        """Return the text that was held back, when no more text comes."""
        text, self._pending = self._pending.rstrip() if self.reasoning else self._pending, ""
        return [(text, self.reasoning)] if text else []

    def _parse_start(self) -> None:
        text = self._pending.lstrip()
        if text.startswith(self._tags.open):
            self._state, self._pending = "reasoning", text.removeprefix(self._tags.open)
        elif not self._tags.open.startswith(text):
            self._state = "answer"

    def _parse_reasoning(self) -> list[tuple[str, bool]]:
        if not self._has_reasoning:
            self._pending = self._pending.lstrip()
        text, tag, rest = self._pending.partition(self._tags.close)
        if tag:
            self._state = "gap"
            text, self._pending = text.rstrip(), rest
        else:
            decided = len(text[: len(text) - partial_length(text, self._tags.close)].rstrip())
            text, self._pending = text[:decided], text[decided:]
        self._has_reasoning = self._has_reasoning or bool(text)
        return [(text, True)] if text else []


def partial_length(text: str, *tags: str) -> int:
    """Return how many characters at the end of `text` could be the beginning of one of `tags`."""
    longest = min(max(map(len, tags)) - 1, len(text))
    return next(n for n in range(longest, -1, -1) if any(tag.startswith(text[len(text) - n :]) for tag in tags))
