"""The model of a chat: its prompts, options, and answers, and the turns that these become."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from mlxlm.cache import KVOptions
from mlxlm.cache.prefix_cache import common_prefix_length
from mlxlm.chat.answer_parser import AnswerParser
from mlxlm.chat.chat_encoder import answer_eos_token_ids, chat_encoder
from mlxlm.chat.chat_template import PLAIN
from mlxlm.chat.history import Exchange, Turn
from mlxlm.chat.messages import Message
from mlxlm.chat.reasoning import THINK, effort_variables, split
from mlxlm.chat.tool_grammar import constrain_calls, excludes_reasoning
from mlxlm.generation import (
    Context,
    Engine,
    GenerationOptions,
    GenerationResult,
    LoadedModel,
    Request,
    TextStream,
)
from mlxlm.generation.context import UNLIMITED
from mlxlm.generation.request import max_new_tokens_for
from mlxlm.tokenizer import Tokenizer
from mlxlm.utils.errors import MlxlmError

if TYPE_CHECKING:
    from mlxlm.chat.tools import CallableTool
    from mlxlm.generation.sampling_functions import SamplingFunctions
    from mlxlm.generation.speculative import SpeculativeDecoder


class ChatModel:
    """A model with everything that changes when a chat switches to another one.

    Attributes:
        engine: Generates the answers, and keeps what was read.
        defaults: The generation options of a new chat.
        limit: Tokens of a conversation, its answer included; more than `UNLIMITED` with a rotating cache.
        eos_token_ids: Tokens that end an answer.
        tools: The tools that an answer may call, by their names.
        functions: The caller's functions that take part in sampling.
        reasoning_effort: How much the model should reason, if its chat template knows that; None for its default.
    """

    reasoning_effort: str | None = None

    def __init__(
        self,
        lm: LoadedModel,
        chat_template: str | None,
        kv: KVOptions,
        speculation: SpeculativeDecoder | None,
        tools: Sequence[Callable[..., Any] | CallableTool],
        functions: SamplingFunctions | None,
    ):
        """Raise TokenizerError for a bad chat template, GenerationError for settings that this model can't use."""
        self.tools, self.functions, self._speculation = _by_name(tools), functions, speculation
        self.lm, self.requested_chat_template = lm, chat_template
        self.chat_encoder = chat_encoder(lm.tokenizer, lm.eos_token_ids, chat_template)
        self.limit = 1 + max_new_tokens_for(lm, [0], kv)
        self.engine = Engine(lm, kv=kv, speculation=speculation)
        self._drops_tokens = Context(lm.model, kv).drops_tokens
        self.eos_token_ids = answer_eos_token_ids(lm, self.chat_encoder)
        self.defaults = lm.generation_options()
        if self.chat_encoder.name != PLAIN:
            self.defaults = replace(self.defaults, max_tokens=None)

    @property
    def context_size(self) -> int:
        """Tokens that the model can see: its context, or the size of a rotating cache."""
        return min(self.limit, self.engine.kv.size or UNLIMITED)

    def with_model(self, lm: LoadedModel, options: GenerationOptions) -> tuple[ChatModel, GenerationOptions]:
        """Return the same for another model, and what `options` become for it.

        They stay, except a `logit_bias` for another tokenizer and what was a default of this model. Raises as `check`.
        """
        tools, kv = tuple(self.tools.values()), self.engine.kv
        other = ChatModel(lm, self.requested_chat_template, kv, self._speculation, tools, self.functions)
        if lm.tokenizer.fingerprint != self.lm.tokenizer.fingerprint:
            options = replace(options, logit_bias={})
        unchanged = [name for name, value in vars(self.defaults).items() if getattr(options, name) == value]
        options = replace(options, **{name: getattr(other.defaults, name) for name in unchanged})
        other.check(options)
        if other.chat_encoder.has_effort:
            other.reasoning_effort = self.reasoning_effort
        return other, options

    def set_tools(self, tools: Sequence[Callable[..., Any] | CallableTool], options: GenerationOptions) -> None:
        """Replace the tools. Raise as `check`, and change nothing, if `options` can't be used with them."""
        before, self.tools = self.tools, _by_name(tools)
        try:
            self.check(options)
        except MlxlmError:
            self.tools = before
            raise

    def check(self, options: GenerationOptions) -> None:
        """Raise GenerationError for options that this model can't use, alone or with the tools."""
        options = self._constrain(options, self.chat_encoder.generation_prefix, may_call=True)
        request = Request([0], options, self.eos_token_ids, functions=self.functions)
        request.check(self.lm, self.engine.kv)
        request.compile_grammar(self.lm)

    def start_answer(self, exchange: Exchange, options: GenerationOptions) -> Message:
        """Return what the template puts at the start of an answer, such as an opening "<think>".

        If the options exclude reasoning, the end of the prompt says so.
        """
        text, tokenizer = self.chat_encoder.generation_prefix_of(exchange.prompt), self.lm.tokenizer
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True, continues=True)
        if excludes_reasoning(options):
            more = self.chat_encoder.start_of_answer(exchange.prompt)
            exchange.prompt = [*exchange.prompt, *more]
            text, ids = text + tokenizer.decode(more, skip_special_tokens=False), ids + more
        return Message("assistant", text, tuple(ids))

    def encode(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, continue_final_message: bool = False
    ) -> list[int]:
        """Return the token ids of a conversation with the tools. See `ChatTemplate.render`."""
        return self.chat_encoder.encode(
            messages,
            tools=[tool.to_dict() for tool in self.tools.values()],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_kwargs=effort_variables(self.reasoning_effort),
        )

    def prompt(
        self, earlier: Sequence[Message], question: str, steps: Sequence[Message] = (), answer: Message | None = None
    ) -> list[int]:
        """Return the token ids of a conversation, a question and its steps, up to where the answer starts.

        With `answer` they end with its text, which the model continues. Raises TokenizerError if the template doesn't
        end with it.
        """
        messages = [*earlier, Message("user", question), *steps]
        if answer is None:
            return self.encode(messages)
        return self.encode([*messages, answer], continue_final_message=True)

    def answer(
        self,
        earlier: Sequence[Message],
        prompt: Sequence[int],
        options: GenerationOptions,
        on_prefill: Callable[[int], None] | None,
        may_call: bool,
    ) -> TextStream:
        """Start the answer to `prompt`, a question after `earlier` messages, which may call the tools or not."""
        question = common_prefix_length(prompt, self.prompt(earlier, "")) if self._drops_tokens else None
        if options.seed is not None:
            options = options.with_seed(options.seed)  # deterministic answers read the whole conversation again
        options = self._constrain(options, self.chat_encoder.generation_prefix_of(prompt), may_call)
        skip = self.chat_encoder.skip_special_tokens
        request = Request(prompt, options, self.eos_token_ids, question, self.functions, skip)
        return self.engine.submit(request, on_prefill=on_prefill)

    def _constrain(self, options: GenerationOptions, generation_prefix: str, may_call: bool) -> GenerationOptions:
        return constrain_calls(
            options,
            list(self.tools.values()),
            self.chat_encoder,
            self.lm.tokenizer,
            generation_prefix,
            tool_choice="auto" if may_call else "none",
        )

    def parser(self, start: str, may_call: bool) -> AnswerParser:
        """Return the parser of an answer that begins with `start`, and which may call the tools or not."""
        tags = self.chat_encoder.reasoning_tags
        format = self.chat_encoder.tool_format if self.tools and may_call else None
        parser = AnswerParser(format, tags, list(self.tools.values()))
        parser.push(start if tags is THINK else tags.render(*split(start)))
        return parser

    def turn(self, exchange: Exchange, start: Message, result: GenerationResult, parser: AnswerParser) -> Turn:
        """Return the turn of an answer, which begins with `start`, the end of the prompt.

        The model has read that, and a template that keeps reasoning renders it again.

        Args:
            exchange: The question.
            start: The beginning of the answer.
            result: What the model has generated.
            parser: Has parsed both. Calls have no results yet and aren't kept, nor is the beginning of one.
        """
        generated = result.tokens[:-1] if result.tokens[-1] in self.eos_token_ids else result.tokens
        text, ids = start.content + result.text, (*start.ids, *generated)
        if self.chat_encoder.reasoning_tags is not THINK:
            text = THINK.render(parser.text("reasoning"), parser.text("text"))
        # With a finish reason, the parser holds nothing back.
        if parser.calls or result.finish_reason is not None and split(text)[1] != parser.text("text"):
            text = parser.text("text")
        was_read = tuple(exchange.prompt[len(exchange.prompt) - len(start.ids) :]) == start.ids
        if not was_read or not decodes_to(self.lm.tokenizer, ids, text):
            ids = ()
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return Turn(exchange.question, text, ids, result.seed, result.finish_reason, now, tuple(exchange.steps))


def edited_answer(answer: Message, text: str, tokenizer: Tokenizer) -> Message:
    """Return an answer with another text. It keeps its tokens up to the change, which the model has read already."""
    if text == answer.content:
        return answer

    def is_changed(count: int) -> bool:
        return not text.startswith(tokenizer.decode(answer.ids[:count], skip_special_tokens=False))

    kept = answer.ids[: max(0, bisect_left(range(len(answer.ids) + 1), True, key=is_changed) - 1)]
    rest = text.removeprefix(tokenizer.decode(kept, skip_special_tokens=False))
    ids = (*kept, *tokenizer.encode(rest, add_special_tokens=False, continues=bool(kept)))
    return Message("assistant", text, ids if kept and decodes_to(tokenizer, ids, text) else ())


def decodes_to(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> bool:
    """Whether `ids` decode to exactly this text: no stop string, partial character or special token in addition."""
    return all(id < tokenizer.vocab_size for id in ids) and tokenizer.decode(ids, skip_special_tokens=False) == text


def _by_name(tools: Sequence[Callable[..., Any] | CallableTool]) -> dict[str, CallableTool]:
    if not tools:
        return {}
    from mlxlm.chat.tools import callable_tools  # imports pydantic, which takes 0.1 s

    return callable_tools(tools)
