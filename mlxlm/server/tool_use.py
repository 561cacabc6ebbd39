"""The tools of a request, and the grammar that makes an answer call them correctly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxlm.chat.messages import parse_tools
from mlxlm.chat.reasoning import OPEN
from mlxlm.chat.tool_grammar import tool_grammar
from mlxlm.generation import GenerationOptions
from mlxlm.server.errors import invalid
from mlxlm.server.models import ServedModel
from mlxlm.utils.errors import GenerationError, TokenizerError


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request.

    Attributes:
        tools: The functions, as in chat completions.
        choice: `tool_choice` of chat completions: "auto", "none", "required", or a function.
        parallel: Whether an answer may have several calls.
        allowed: The names of the functions that may be called; None for all.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    choice: Any = "auto"
    parallel: bool = True
    allowed: frozenset[str] | None = None

    def __post_init__(self) -> None:
        try:
            parse_tools(self.tools)
        except TokenizerError as error:
            raise invalid(str(error), "tools") from None

    @classmethod
    def from_openai(cls, tools: Sequence[Mapping[str, Any]] | None, choice: Any, parallel: bool | None) -> ToolUse:
        """From tools as in chat completions, and `tool_choice` and `parallel_tool_calls` of OpenAI's APIs.

        Raises:
            ApiError: For an invalid `tool_choice`.
        """
        use = cls(tuple(tools or ()), "auto" if choice is None else choice, parallel is not False)
        if not isinstance(choice, dict) or choice.get("type") not in ("function", "allowed_tools"):
            return use  # `tool_grammar` checks it
        if choice["type"] == "function":
            function = choice.get("function", choice)  # the Responses API has the name next to the type
            return replace(use, choice=_named(function.get("name") if isinstance(function, dict) else None))
        settings = choice.get("allowed_tools", choice)
        try:
            names = frozenset(entry.get("name") or entry["function"]["name"] for entry in settings["tools"])
            known = {tool["function"]["name"] for tool in use.tools}
            if not names or not names <= known or settings["mode"] not in ("auto", "required"):
                raise ValueError
        except (KeyError, TypeError, AttributeError, ValueError):
            raise invalid(
                'tool_choice doesn\'t name tools of the request, with the mode "auto" or "required"', "tool_choice"
            ) from None
        return replace(use, choice=settings["mode"], allowed=names)

    @classmethod
    def from_anthropic(cls, tools: Sequence[Mapping[str, Any]], choice: Mapping[str, Any]) -> ToolUse:
        """From tools as in chat completions, and `tool_choice` of Anthropic's API."""
        choices = {"auto": "auto", "any": "required", "none": "none", "tool": _named(choice.get("name"))}
        kind = choice.get("type")
        if not isinstance(kind, str) or kind not in choices:
            raise invalid(f"there is no tool_choice of this type (try: {', '.join(choices)})", "tool_choice.type")
        return cls(tools, choices[kind], not choice.get("disable_parallel_tool_use"))

    async def constrain(
        self, model: ServedModel, options: GenerationOptions, generation_prefix: str
    ) -> GenerationOptions:
        """Add the grammar of tool calls to the options, if there are tools.

        Args:
            model: The model.
            options: The options. A JSON schema is the only constraint that can be combined with tools.
            generation_prefix: What the template has put at the start of the answer.

        Raises:
            ApiError: For tools that can't be used with this model or these options.
        """
        if self.tools and options.constraint not in (None, "json_schema"):
            raise invalid(f"{options.constraint} and tools (try: one of them)", "tools")
        try:
            grammar = await asyncio.to_thread(self._grammar, model, options, generation_prefix)
        except GenerationError as error:
            raise invalid(str(error), "tool_choice" if error.message.startswith("tool_choice") else "tools") from None
        return options if grammar is None else replace(options, json_schema=None, grammar=grammar)

    def _grammar(self, model: ServedModel, options: GenerationOptions, generation_prefix: str) -> str | None:
        tools = [tool for tool in parse_tools(self.tools) if self.allowed is None or tool.name in self.allowed]
        schema = options.json_schema
        return tool_grammar(
            model.encoder.tool_format,
            tools,
            model.lm.tokenizer,
            tool_choice=self.choice,
            parallel_tool_calls=self.parallel,
            json_schema=json.loads(schema) if isinstance(schema, str) else None,
            reasoning=generation_prefix if self._may_reason(model) else None,
        )

    @staticmethod
    def _may_reason(model: ServedModel) -> bool:
        return OPEN in getattr(model.encoder, "source", "")


def _named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}
