"""A conversation that a model answers: its prompt, its tools, and the texts that answer it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from mlxlm.chat.answer_parser import AnswerParser
from mlxlm.chat.chat_encoder import ChatEncoder
from mlxlm.chat.messages import Message, parse_tools
from mlxlm.chat.tool_grammar import constrain_calls, excludes_reasoning
from mlxlm.generation import GenerationOptions
from mlxlm.generation.request import context_limit
from mlxlm.server.errors import ApiError, invalid
from mlxlm.server.models import ServedModel
from mlxlm.server.schemas import Fields
from mlxlm.server.text import Text, sample_requests
from mlxlm.utils.errors import GenerationError, TokenizerError


class ToolFields(Fields):
    """An entry of `tools` in any API. The model is only offered functions: others are run by another server.

    Attributes:
        type: What it is: `function_type` for a function.
    """

    function_type: ClassVar[str] = "function"
    type: str

    @property
    def is_left_out(self) -> bool:
        """Whether it isn't a function."""
        return self.type != self.function_type

    def to_chat(self) -> dict[str, Any]:
        """The function as in chat completions."""
        return self.model_dump(exclude_none=True)


def functions_of(tools: Sequence[ToolFields] | None) -> list[dict[str, Any]]:
    """The functions among the tools of a request, as in chat completions."""
    return [tool.to_chat() for tool in tools or () if not tool.is_left_out]


def check_offered(name: Any, tools: Sequence[ToolFields] | None) -> None:
    """Raise ApiError if `tool_choice` has the name or type of a tool that is left out."""
    left_out = [(tool.type, getattr(tool, "name", None)) for tool in tools or () if tool.is_left_out]
    if isinstance(name, str) and any(name in names for names in left_out):
        raise invalid(
            f"tool_choice is {name[:100]}, a tool that this server doesn't run (try: a function)", "tool_choice"
        )


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
    def from_openai(cls, tools: Sequence[ToolFields] | None, choice: Any, parallel: bool | None) -> ToolUse:
        """From `tools`, `tool_choice` and `parallel_tool_calls` of OpenAI's APIs.

        Raises:
            ApiError: For an invalid `tool_choice`.
        """
        choice = {None: "auto", "any": "required"}.get(choice, choice) if isinstance(choice, str | None) else choice
        use = cls(functions_of(tools), choice, parallel is not False)
        kind = choice.get("type") if isinstance(choice, dict) else None
        if kind not in ("function", "allowed_tools"):
            check_offered(kind, tools)
            return use  # `tool_grammar` checks it
        if kind == "function":
            function = choice.get("function", choice)  # the Responses API has the name next to the type
            return replace(use, choice=named_tool(function.get("name") if isinstance(function, dict) else None))
        settings = choice.get("allowed_tools", choice)
        try:
            functions = [entry for entry in settings["tools"] if entry.get("type", "function") == "function"]
            names = frozenset(entry.get("name") or entry["function"]["name"] for entry in functions)
            known = {tool["function"]["name"] for tool in use.tools}
            if not names or not names <= known or settings["mode"] not in ("auto", "required"):
                raise ValueError
        except (KeyError, TypeError, AttributeError, ValueError):
            raise invalid(
                'tool_choice doesn\'t name functions of the request, with the mode "auto" or "required"', "tool_choice"
            ) from None
        return replace(use, choice=settings["mode"], allowed=names)

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
        tools = [tool for tool in parse_tools(self.tools) if self.allowed is None or tool.name in self.allowed]
        try:
            return await asyncio.to_thread(
                constrain_calls,
                options,
                tools,
                model.encoder,
                model.lm.tokenizer,
                generation_prefix,
                tool_choice=self.choice,
                parallel_tool_calls=self.parallel,
            )
        except GenerationError as error:
            if not tools and self.choice == "auto":
                raise  # about the schema
            raise invalid(str(error), "tool_choice" if error.message.startswith("tool_choice") else "tools") from None


def named_tool(name: Any) -> dict[str, Any]:
    """The `tool_choice` of chat completions that names a function."""
    return {"type": "function", "function": {"name": name}}


@dataclass(frozen=True)
class Conversation:
    """A conversation that a model answers.

    Attributes:
        messages: The messages. If the last one is the assistant's, the answer continues it.
        template_kwargs: Further variables of the chat template.
        tool_use: The tools that the answer may call.
    """

    messages: Sequence[Message]
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_use: ToolUse = field(default_factory=ToolUse)

    async def encode(self, model: ServedModel, *, count_only: bool = False) -> list[int]:
        """Encode the prompt. See `ServedModel.encode`.

        Raises:
            ApiError: It is too long.
            TokenizerError: The chat template refuses the conversation.
        """
        return await model.encode(
            model.encoder.encode,
            self.messages,
            tools=self.tool_use.tools,
            continue_final_message=self.messages[-1].role == "assistant",
            template_kwargs=self.template_kwargs,
            count_only=count_only,
        )

    async def truncate(self, model: ServedModel, room: int) -> Conversation:
        """Drop the oldest turns, as few as possible, so that the prompt and `room` more tokens fit into the context.

        A turn is a user's message with what follows it. System messages at the beginning stay, and so does the last
        turn, even if it is too long. At most half of the context is left free.
        """
        limit = context_limit(model.lm, model.settings.kv)
        room = min(room, limit // 2)
        roles = [message.role for message in self.messages]
        head = next((n for n, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
        starts = [head, *(n for n, role in enumerate(roles) if role == "user" and n > head)]

        def truncated(start: int) -> Conversation:
            return replace(self, messages=[*self.messages[:head], *self.messages[start:]])

        async def fits(start: int) -> bool:
            try:
                return len(await truncated(start).encode(model)) + room <= limit
            except ApiError:  # far too long
                return False

        if await fits(head):
            return self
        low, high = 1, len(starts) - 1  # a prompt gets shorter with each turn
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if await fits(starts[middle]) else (middle + 1, high)
        return truncated(starts[min(low, high)])

    async def answers(
        self, model: ServedModel, options: GenerationOptions, eos_token_ids: frozenset[int], n: int = 1
    ) -> list[Text]:
        """The texts of `n` answers, to be submitted.

        Args:
            model: The model.
            options: The options of the answers.
            eos_token_ids: Tokens that end an answer.
            n: The number of answers.

        Raises:
            ApiError: The prompt is too long, or the tools can't be used with this model or these options.
            TokenizerError: The chat template refuses the conversation.
        """
        prompt, encoder = await self.encode(model), model.encoder
        if excludes_reasoning(options):
            prompt += encoder.start_of_answer(prompt)
        prefix = encoder.generation_prefix_of(prompt)
        options = await self.tool_use.constrain(model, options, prefix)
        requests = sample_requests([prompt], options, eos_token_ids, n, encoder.skip_special_tokens)
        return [Text(index, request, self._parser(encoder, prefix)) for index, request in enumerate(requests)]

    def _parser(self, encoder: ChatEncoder, prefix: str) -> AnswerParser:
        tools = parse_tools(self.tool_use.tools)
        parser = AnswerParser(encoder.tool_format if tools else None, encoder.reasoning_tags, tools)
        parser.push(prefix)
        return parser


def continuation(
    model: ServedModel, prompt: Sequence[int], options: GenerationOptions, eos_token_ids: frozenset[int]
) -> Text:
    """The text that continues a prompt, to be submitted."""
    [request] = sample_requests([prompt], options, eos_token_ids, 1)
    return Text(0, request)
