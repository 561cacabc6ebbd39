"""Answers to conversations: the prompt, and the parts of an answer (reasoning, text, tool calls)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from mlxlm.chat.messages import Message
from mlxlm.chat.reasoning import CLOSE, ReasoningParser
from mlxlm.chat.tool_calls import ArgumentsDelta, TextDelta, ToolCallParser, ToolCallStart, ToolEvent, ToolFormat
from mlxlm.generation import GenerationChunk, GenerationOptions
from mlxlm.generation.constraint import Grammar
from mlxlm.server.models import ServedModel
from mlxlm.server.state import ServerState
from mlxlm.server.texts import Texts, generate, sample_requests
from mlxlm.server.tool_use import ToolUse


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

    async def encode(self, model: ServedModel, at_least: int = 0) -> list[int]:
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
            at_least=at_least,
        )


@dataclass(frozen=True)
class Delta:
    """A piece of an answer.

    Attributes:
        kind: The part that it belongs to; "call" for the arguments of a tool call.
        text: The piece; "" at the beginning of a call.
        call_id: The id of the call, in the first piece of a call.
        name: The function, in the first piece of a call.
    """

    kind: Literal["reasoning", "text", "call"]
    text: str
    call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class Answers:
    """Answers that are being generated.

    Attributes:
        model: The model.
        texts: Their texts.
        parsers: One for each text.
    """

    model: ServedModel
    texts: Texts
    parsers: Sequence[AnswerParser]


@asynccontextmanager
async def answering(
    state: ServerState,
    model_name: str | None,
    conversation: Conversation,
    make_options: Callable[[GenerationOptions], GenerationOptions],
    n: int = 1,
) -> AsyncIterator[Answers]:
    """Generate `n` answers. At the end of the block, unfinished ones are cancelled.

    Args:
        state: The server.
        model_name: The model of the request, if it has one.
        conversation: The conversation.
        make_options: Returns the options of the request for those that are the model's defaults.
        n: The number of answers.

    Raises:
        ApiError: As `Models.use`, `generate` and `make_options`.
        MlxlmError: The template refuses the conversation, or a constraint isn't supported.
    """
    async with state.models.use(model_name) as model:
        options = make_options(model.defaults)
        prompt = await conversation.encode(model)
        tool_format = model.encoder.tool_format if conversation.tool_use.tools else None
        prefix: str | None = model.encoder.generation_prefix_of(prompt)
        options = await conversation.tool_use.constrain(model, options, prefix or "")
        await check_constraint(model, options)
        if options.constraint is not None and tool_format is None:
            prompt, prefix = _close_reasoning(model, prompt), None
        parsers = [AnswerParser(prefix, tool_format) for _ in range(n)]
        requests = sample_requests([prompt], options, model.eos_token_ids, n)
        async with generate(model, requests, state.metrics) as texts:
            yield Answers(model, texts, parsers)


async def check_constraint(model: ServedModel, options: GenerationOptions) -> None:
    """Raise GenerationError for a constraint that isn't supported. The compiled grammar is cached for the engine."""
    if options.constraint is not None:
        lm = model.lm
        await asyncio.to_thread(Grammar.compile, options, lm.tokenizer, lm.config.vocab_size, model.eos_token_ids)


def _close_reasoning(model: ServedModel, prompt: Sequence[int]) -> list[int]:
    """End the <think> block if the template opens one: a constrained answer can't have reasoning."""
    if not model.encoder.generation_prefix_of(prompt):
        return list(prompt)
    encode = model.lm.tokenizer.encode
    return [*prompt, *encode(f"\n{CLOSE}\n\n", add_special_tokens=False, parse_special=True, continues=True)]


class AnswerParser:
    """Splits the streamed text of an answer into reasoning, text and tool calls.

    Attributes:
        reasoning_tokens: The number of tokens of the reasoning, its tags included.
        has_calls: Whether the answer has a tool call.
    """

    def __init__(self, generation_prefix: str | None, tool_format: ToolFormat | None):
        """Create a parser for one answer.

        Args:
            generation_prefix: What the template has put at the start of the answer, such as "<think>"; None for an
                answer without reasoning.
            tool_format: The markup of tool calls; None for an answer without calls.
        """
        self.reasoning_tokens, self.has_calls = 0, False
        self._reasoning: ReasoningParser | None = None
        if generation_prefix is not None:
            self._reasoning = ReasoningParser()
            self._reasoning.push(generation_prefix)
        self._calls = None if tool_format is None else ToolCallParser(tool_format)

    def push(self, chunk: GenerationChunk) -> list[Delta]:
        """Add a chunk and return what is decided."""
        deltas = []
        for text, is_reasoning in self._split_reasoning(chunk):
            if is_reasoning:
                deltas.append(Delta("reasoning", text))
            else:
                deltas += [Delta("text", text)] if self._calls is None else self._deltas(self._calls.push(text))
        if chunk.finish_reason is not None and self._calls is not None:
            cut_off = chunk.finish_reason not in ("eos", "stop")
            deltas += self._deltas(self._calls.finish(cut_off=cut_off))
        return [delta for delta in deltas if delta.text or delta.call_id is not None]

    def _split_reasoning(self, chunk: GenerationChunk) -> list[tuple[str, bool]]:
        if self._reasoning is None:
            return [(chunk.text, False)]
        before = self._reasoning.reasoning
        parts = self._reasoning.push(chunk.text)
        self.reasoning_tokens += before or self._reasoning.reasoning or any(reasoning for _, reasoning in parts)
        return parts if chunk.finish_reason is None else parts + self._reasoning.finish()

    def _deltas(self, events: Sequence[ToolEvent]) -> list[Delta]:
        deltas = []
        for event in events:
            if isinstance(event, TextDelta):
                deltas.append(Delta("text", event.text))
            elif isinstance(event, ToolCallStart):
                self.has_calls = True
                deltas.append(Delta("call", "", event.id, event.name))
            elif isinstance(event, ArgumentsDelta):
                deltas.append(Delta("call", event.text))
        return deltas


def reasoning_kwargs(effort: str | None, verbosity: str | None = None) -> dict[str, Any]:
    """`reasoning_effort` and `verbosity` as variables of the chat template. Most templates ignore them."""
    values: dict[str, Any] = {"reasoning_effort": effort, "verbosity": verbosity}
    if effort == "none":
        values["enable_thinking"] = False
    return {name: value for name, value in values.items() if value is not None}
