"""A conversation with a model over one key-value cache."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from mlxlm.cache import KVOptions, fingerprint
from mlxlm.chat.answer import Answer, Cancellation, ChatStats, parsed_chunks
from mlxlm.chat.chat_encoder import Messages, parse_messages
from mlxlm.chat.chat_model import ChatModel, edited_answer
from mlxlm.chat.generate import sampling_functions
from mlxlm.chat.history import (
    MAIN_BRANCH,
    Branches,
    ContextOverflow,
    Conversation,
    Exchange,
    Turn,
    check_context_overflow,
    drop_oldest_turns,
    fit_to_context,
    turns_of,
)
from mlxlm.chat.messages import Message
from mlxlm.chat.reasoning import check_effort
from mlxlm.chat.session_file import Session, SessionFiles, cache_path, restore
from mlxlm.config.option import non_default_fields
from mlxlm.generation import GenerationChunk, GenerationOptions, GenerationResult, LoadedModel
from mlxlm.generation.gumbel_noise import random_seed
from mlxlm.generation.loaded_model import loaded
from mlxlm.generation.options import OptionArguments
from mlxlm.generation.result import ToolCall
from mlxlm.generation.sampling_functions import LogitsFunction, SamplerFunction
from mlxlm.tokenizer.tokenizer import check_unicode
from mlxlm.utils.errors import GenerationError, MlxlmError, one_line

if TYPE_CHECKING:
    from mlxlm.chat.tools import AllowCall, CallableTool
    from mlxlm.generation.speculative import SpeculativeDecoder

OnPrefill = Callable[[int], None]
MAX_ROUNDS = 10  # of calls in one answer: small models tend to repeat them until they are stopped


class Chat:
    """A conversation, its branches, and the cache of what the model has read.

        chat = Chat("small-world", system_prompt="You are brief.")
        for chunk in chat.ask("Hello!"):
            print(chunk.text, end="")
        print(chat.ask("What is my name?").text)

    Each turn encodes the whole conversation and reads only what the cache doesn't have, usually the new message. Undo,
    retry, edit, branch, switch and reset change only the messages; the next turn trims the cache to the common prefix.
    If the template drops the reasoning of earlier answers, the last answer is read again without it.

    Every answer (retries and undone ones included) uses the seed after that of the answer before.

    Args:
        lm: The model, or its name, as in `mlxlm.stream`.
        system_prompt: The system prompt.
        messages: The conversation so far, as Message or {"role": ..., "content": ...} each: the user's and the
            assistant's in turn, with an answer last. Instead of `system_prompt`, a system message may come first.
        chat_template: "model", "chatml", "llama3", "gemma", "plain" or a jinja file; by default, what fits the model.
        context_overflow: What happens when the context is full. "stop": `ask` raises ContextFullError. "drop": if less
            is left than the answer may take (`max_tokens`, at most a quarter of the context), drop the oldest turns
            until half of the context is free. The system prompt stays. A rotating cache (`kv`) never overflows.
        tools: Functions with type hints, or `CallableTool`, that the model can call, in up to ten rounds per answer.
            The chunks of the answer have the calls and their results. `max_tokens` limits each text between calls.
        allow_call: Called before each call; if it returns False, the result is an error that says so.
        reasoning_effort: "none", "low", "medium" or "high", for chat templates that know it. Their variable
            `enable_thinking` is False with "none", else True.
        kv: How keys and values are cached.
        speculation: Speculative decoding: changes the speed, not the text.
        logits_processors: See `mlxlm.stream`.
        sampler: See `mlxlm.stream`. It can't be combined with tools.
        **options: Fields of GenerationOptions. The defaults are those of the model's generation_config.json. Unlike
            elsewhere, `max_tokens` has no limit by default if there is a chat template.

    Raises:
        TokenizerError: The chat template is broken or missing.
        GenerationError: Invalid settings.
    """

    def __init__(
        self,
        lm: LoadedModel | str | Path,
        *,
        system_prompt: str | None = None,
        messages: Messages = (),
        chat_template: str | None = None,
        context_overflow: ContextOverflow = "stop",
        tools: Sequence[Callable[..., Any] | CallableTool] = (),
        allow_call: AllowCall | None = None,
        reasoning_effort: str | None = None,
        kv: KVOptions | None = None,
        speculation: SpeculativeDecoder | None = None,
        logits_processors: Sequence[LogitsFunction] = (),
        sampler: SamplerFunction | None = None,
        **options: Unpack[OptionArguments],
    ):
        lm = loaded(lm)
        parsed = parse_messages(messages)
        if parsed and parsed[0].role == "system":
            if system_prompt is not None:
                raise GenerationError("there are two system prompts", "`system_prompt`, or a system message")
            system_prompt, parsed = parsed[0].content, parsed[1:]
        self.system_prompt = system_prompt
        self._branches = Branches({MAIN_BRANCH: Conversation(turns_of(parsed))})
        self._options: GenerationOptions
        self.allow_call = allow_call
        functions = sampling_functions(logits_processors, sampler, options)
        self._chat_model = ChatModel(lm, chat_template, kv or KVOptions(), speculation, tools, functions)
        self.reasoning_effort = reasoning_effort
        self.options = lm.generation_options(
            tuple(Chat.__init__.__kwdefaults__ or ()), **{"max_tokens": self.defaults.max_tokens, **options}
        )
        self.context_overflow = check_context_overflow(context_overflow)
        self.notes: list[str] = []  # what to tell the user after opening a session file
        self.prompt_tokens = 0  # of the last answer, also while it is generated
        self._answers = self._generated_tokens = 0
        self._last: GenerationResult | None = None
        self._files = SessionFiles()
        self._answering: Callable[[], Answer | None] = lambda: None  # weak: an answer that nobody reads has ended
        self._ended = threading.Event()  # also one that is being dropped
        self._ended.set()

    @property
    def lm(self) -> LoadedModel:
        """The model.

        A new model reads the conversation as text, with its own template. It keeps the options, except a `logit_bias`
        for another tokenizer and what was a default of the old model. If it raises as `Chat` does, the old model stays.
        """
        return self._chat_model.lm

    @lm.setter
    def lm(self, lm: LoadedModel) -> None:
        self._end_answer()
        same_tokenizer = lm.tokenizer.fingerprint == self.lm.tokenizer.fingerprint
        self._chat_model, self._options = self._chat_model.with_model(lm, self._options)
        self._branches.drop_ids_unless(lambda turn: same_tokenizer)

    @property
    def tools(self) -> list[CallableTool]:
        """The tools that the model can call. Setting them raises as `Chat` does, and then changes nothing."""
        return list(self._chat_model.tools.values())

    @tools.setter
    def tools(self, tools: Sequence[Callable[..., Any] | CallableTool]) -> None:
        self._end_answer()
        self._chat_model.set_tools(tools, self._options)

    @property
    def reasoning_effort(self) -> str | None:
        """How much the model should reason. Setting it raises GenerationError if its template can't be told."""
        return self._chat_model.reasoning_effort

    @reasoning_effort.setter
    def reasoning_effort(self, effort: str | None) -> None:
        if effort is not None and not self._chat_model.chat_encoder.has_effort:
            raise GenerationError("the chat template reads no reasoning effort", "a model that reasons")
        self._chat_model.reasoning_effort = check_effort(effort)

    @property
    def system_prompt(self) -> str | None:
        """The system prompt of the next turns. Setting it raises TokenizerError for lone surrogates."""
        return self._system_prompt

    @system_prompt.setter
    def system_prompt(self, text: str | None) -> None:
        check_unicode(text or "")
        self._system_prompt = text or None

    @property
    def messages(self) -> list[Message]:
        """The messages of the current branch, the system prompt first, including dropped ones."""
        return self._messages(self._branches.current.turns)

    @property
    def dropped(self) -> int:
        """How many of the oldest messages of this branch the model no longer sees."""
        conversation = self._branches.current
        return sum(len(turn.messages) for turn in conversation.turns[: conversation.dropped])

    @property
    def branch_name(self) -> str:
        """The current branch."""
        return self._branches.name

    @property
    def branches(self) -> dict[str, int]:
        """The number of turns in each branch."""
        return {name: len(conversation.turns) for name, conversation in self._branches.all.items()}

    @property
    def kv(self) -> KVOptions:
        """How keys and values are cached."""
        return self._chat_model.engine.kv

    @property
    def chat_template(self) -> str:
        """The template in use: "model", "chatml", "llama3", "gemma", "plain", or a file."""
        return self._chat_model.chat_encoder.name

    @property
    def options(self) -> GenerationOptions:
        """Options of the next answer, with its seed. Setting the seed to None draws one.

        Setting them raises GenerationError for values that this model can't use, and then changes nothing.
        """
        return self._options

    @options.setter
    def options(self, options: GenerationOptions) -> None:
        self._chat_model.check(options)
        self._options = replace(options, seed=random_seed()) if options.seed is None else options

    @property
    def defaults(self) -> GenerationOptions:
        """The default options: `max_tokens` is None if a chat template lets the model end its answers."""
        return self._chat_model.defaults

    @property
    def context_size(self) -> int:
        """Tokens that the model can see: its context, or the size of a rotating cache."""
        return self._chat_model.context_size

    @property
    def context_used(self) -> int:
        """Tokens of the context that the conversation takes; 0 before the first turn."""
        return min(self.context_size, len(self.context_ids))

    @property
    def context_ids(self) -> list[int]:
        """The tokens of the conversation that the model sees."""
        turns = self._branches.current.visible_turns
        return self._chat_model.encode(self._messages(turns), add_generation_prompt=False) if turns else []

    def kv_bytes_for(self, num_tokens: int) -> int:
        """Return the size in bytes of the keys and values of `num_tokens` tokens."""
        return self._chat_model.engine.kv_bytes_for(num_tokens)

    @property
    def stats(self) -> ChatStats:
        """Statistics of this chat."""
        stats = self._chat_model.engine.stats
        return ChatStats(self._answers, self._generated_tokens, stats.kv_bytes + stats.prefix_cache_bytes, self._last)

    def token_counts(self) -> list[int]:
        """Return the number of tokens of each of `messages`, without what the template adds."""
        encode = self.lm.tokenizer.encode
        return [len(m.ids or encode(m.content, add_special_tokens=False)) for m in self.messages]

    def ask(self, text: str, on_prefill: OnPrefill | None = None) -> Answer:
        """Answer a message.

        Closing the answer stops it, and the text so far stays in the conversation; without any, the message is dropped.

        Args:
            text: The message.
            on_prefill: Called with the number of prompt tokens read so far.

        Raises:
            GenerationError: The message is empty.
            ContextFullError: The conversation no longer fits the model's context.
            TokenizerError: The template refuses the conversation.
        """
        self._end_answer()
        return self._ask(Exchange(self._branches.current, text), on_prefill)

    def retry(self, on_prefill: OnPrefill | None = None) -> Answer:
        """Answer the last message again, with the next seed; the old answer is replaced at the first token.

        Raises as `ask`, and GenerationError if there is no message.
        """
        self._end_answer()
        shorter, last = self._branches.current.pop_turn()
        return self._ask(Exchange(shorter, last.question), on_prefill)

    def edit(self, text: str, on_prefill: OnPrefill | None = None) -> Answer:
        """Replace the last message and answer the new one, as `retry` does."""
        self._end_answer()
        return self._ask(Exchange(self._branches.current.pop_turn()[0], text), on_prefill)

    def continue_answer(self, text: str | None = None, on_prefill: OnPrefill | None = None) -> Answer:
        """Let the model continue its last answer, with the next seed.

        The chunks have only what is new. The answer in the conversation is replaced at the first of them.

        Args:
            text: Replaces the answer so far. The model reads it from the first change.
            on_prefill: Called with the number of prompt tokens read so far.

        Raises:
            GenerationError: There is no answer, its text is empty, or an option constrains the text as a whole.
            ContextFullError: The conversation no longer fits the model's context.
            TokenizerError: The template can't end with an answer that isn't complete.
        """
        self._end_answer()
        shorter, last = self._branches.current.pop_turn()
        text = last.answer if text is None else text
        check_unicode(text)
        if not text:
            raise GenerationError("the answer is empty", "retry")
        if (constraint := self._options.constraint) is not None:
            raise GenerationError(f"with {constraint}, an answer can't be continued", "retry")
        answer = edited_answer(last.messages[-1], text, self.lm.tokenizer)
        return self._ask(Exchange(shorter, last.question, list(last.steps), answer), on_prefill)

    def undo(self) -> Turn:
        """Remove the last message and its answer, and return them. Raise GenerationError if there is no message.

        If the model then sees no turn at all, dropped turns become visible again.
        """
        self._end_answer()
        shorter, last = self._branches.current.pop_turn()
        self._branches.current = shorter if shorter.visible_turns else Conversation(shorter.turns)
        return last

    def branch(self, name: str) -> None:
        """Continue in a new branch. Raise GenerationError if the name is taken or isn't one word."""
        self._end_answer()
        self._branches.fork(name)

    def switch(self, name: str) -> None:
        """Continue in another branch. Raise GenerationError if it doesn't exist."""
        self._end_answer()
        self._branches.switch(name)

    def reset(self) -> None:
        """Remove the conversation with all its branches, but keep the system prompt."""
        self._end_answer()
        self._branches = Branches()

    def drop_oldest(self, for_message: str = "") -> int:
        """Drop the oldest turns now, as the policy "drop" does, and return how many messages that are.

        They make room for `for_message`, by default the last message, and stay in `messages` and in session files.
        Raises MessageTooLongError if the message doesn't fit by itself.
        """
        self._end_answer()
        before, conversation = self.dropped, self._branches.current
        if not for_message and conversation.turns:
            conversation, last = conversation.pop_turn()
            for_message = last.question
        prompt_of = self._prompt_of(Exchange(conversation, for_message))
        shorter, _ = drop_oldest_turns(conversation, prompt_of, self._chat_model.limit)
        self._branches.current = replace(self._branches.current, dropped=shorter.dropped)
        return self.dropped - before

    def save(self, path: Path | str, *, cache: bool = False) -> None:
        """Write a session file (see `mlxlm.chat.session_file`) atomically.

        An existing file is replaced only if this chat read or wrote it and it hasn't changed since.

        Args:
            path: The file.
            cache: Also write the key-value cache, so that `open` needn't read the conversation again.

        Raises:
            GenerationError: The file can't be written or replaced.
            CheckpointError: The cache can't be written (for caches of another kind); the session file is written.
        """
        self._end_answer()
        path = Path(path)
        session = Session(
            model=str(self.lm.path),
            weights=fingerprint(self.lm.model),
            tokenizer=self.lm.tokenizer.fingerprint,
            chat_template=self._chat_model.requested_chat_template,
            system_prompt=self.system_prompt,
            context_overflow=self.context_overflow,
            reasoning_effort=self.reasoning_effort,
            options=non_default_fields(self.options, self.defaults),
            kv=self.kv,
            branches=self._branches,
        )
        self._files.write(path, session)
        if cache:
            self._chat_model.engine.save_prefix(cache_path(path.resolve()), self.context_ids)

    @classmethod
    def open(
        cls,
        path: Path | str,
        lm: LoadedModel | str | Path,
        *,
        chat_template: str | None = None,
        context_overflow: ContextOverflow | None = None,
        reasoning_effort: str | None = None,
        kv: KVOptions | None = None,
        speculation: SpeculativeDecoder | None = None,
        **options: Unpack[OptionArguments],
    ) -> Chat:
        """Continue the chat of a session file. Arguments override the settings in the file.

        Without a usable key-value cache, the next turn reads the conversation again. With another model than the
        file's, the chat continues as text. `notes` says which of these happened.

        Raises:
            GenerationError: The file is not a session file; the message names path and line. Also as `Chat`.
        """
        path, lm, files = Path(path), loaded(lm), SessionFiles()
        session = files.read(path)
        settings, notes, same_model = restore(session, path, lm, chat_template)
        given = {"chat_template": chat_template, "context_overflow": context_overflow, "kv": kv}
        given = {name: value for name, value in (given | {"reasoning_effort": reasoning_effort}).items() if value}
        chat = cls(lm, speculation=speculation, **{**settings, **options, **given})
        chat._files, chat._branches, chat.notes = files, session.branches, notes
        if same_model and (cache := cache_path(path.resolve())).exists():
            try:
                chat._chat_model.engine.load_prefix(cache)
            except MlxlmError as error:
                problem = f"the conversation is read again, since its cache can't be used: {error.message}"
                chat.notes.append(one_line(problem))
        return chat

    def _messages(self, turns: Sequence[Turn]) -> list[Message]:
        system = [Message("system", self._system_prompt)] if self._system_prompt else []
        return system + [message for turn in turns for message in turn.messages]

    def _prompt_of(self, exchange: Exchange) -> Callable[[Conversation], list[int]]:
        """Return a function that encodes an exchange after other turns."""
        messages, prompt = self._messages, self._chat_model.prompt
        question, steps, answer = exchange.question, exchange.steps, exchange.answer
        return lambda conversation: prompt(messages(conversation.visible_turns), question, steps, answer)

    def _fit(self, exchange: Exchange) -> None:
        """Make room for an answer, and encode its prompt."""
        exchange.conversation, exchange.prompt = fit_to_context(
            exchange.conversation,
            self._prompt_of(exchange),
            self._chat_model.limit,
            self.context_overflow,
            self._options.max_tokens,
        )
        self._branches.current = replace(self._branches.current, dropped=exchange.conversation.dropped)
        self.prompt_tokens = len(exchange.prompt)

    def _ask(self, exchange: Exchange, on_prefill: OnPrefill | None) -> Answer:
        if not exchange.question:
            raise GenerationError("the message is empty", "some text")
        self._fit(exchange)
        cancellation = Cancellation()
        answering = Answer(self._answer(exchange, on_prefill, cancellation), cancellation)
        self._answering = weakref.ref(answering)
        return answering

    def _answer(
        self, exchange: Exchange, on_prefill: OnPrefill | None, cancellation: Cancellation
    ) -> Generator[GenerationChunk, None, None]:
        """Generate an answer. While the model calls tools, run the calls and let it go on with their results."""
        tools, before = self._chat_model.tools, self._generated_tokens
        ended = self._ended = threading.Event()
        try:
            for rounds_left in reversed(range(MAX_ROUNDS + 1 if tools and exchange.answer is None else 1)):
                message = yield from self._generate(exchange, on_prefill, cancellation, may_call=rounds_left > 0)
                if message is None:
                    break
                from mlxlm.chat.tools import run_call

                exchange.steps.append(message)
                for call in message.tool_calls:
                    yield GenerationChunk("", tool_call=call)
                    result = run_call(tools, call, self.allow_call)
                    yield GenerationChunk("", tool_call=call, tool_result=result)
                    exchange.steps.append(Message("tool", result, tool_call_id=call.id, name=call.name))
                self._fit(exchange)
        finally:
            self._answers += self._generated_tokens > before
            ended.set()

    def _generate(
        self, exchange: Exchange, on_prefill: OnPrefill | None, cancellation: Cancellation, *, may_call: bool
    ) -> Generator[GenerationChunk, None, Message | None]:
        """Generate one text of an answer, which becomes the last turn. Return it as a message if it ends with calls."""
        earlier = self._messages(exchange.conversation.visible_turns)
        start = exchange.answer or self._chat_model.start_answer(exchange, self._options)
        stream = self._chat_model.answer(earlier, exchange.prompt, self._options, on_prefill, may_call)
        cancellation.attach(stream)
        parser, reason = self._chat_model.parser(start.content, may_call), None
        try:
            for generated in stream:
                chunks, reason = parsed_chunks(parser, generated), generated.finish_reason
                if parser.calls and reason in ("eos", "stop"):
                    chunks[-1] = replace(chunks[-1], finish_reason=None)  # the answer goes on
                yield from chunks
        finally:
            stream.cancel()
            if (result := stream.partial_result()).tokens:
                turns = (*exchange.conversation.turns, self._chat_model.turn(exchange, start, result, parser))
                self._branches.current = replace(exchange.conversation, turns=turns)
                if self._options.seed == result.seed:  # it was not set during the answer
                    self._options = replace(self._options, seed=(result.seed + 1) % 2**64)
                self._generated_tokens += len(result.tokens)
                self._last = result
        if not parser.calls or reason not in ("eos", "stop"):
            return None
        calls = tuple(ToolCall(part.call_id or "", part.name or "", part.text) for part in parser.calls)
        reasoning = parser.text("reasoning") or None
        return Message("assistant", parser.text("text"), tool_calls=calls, reasoning_content=reasoning)

    def _end_answer(self) -> None:
        """End an answer that is being generated, also one that another thread is iterating."""
        if (answering := self._answering()) is not None:
            answering.close()
        self._ended.wait()
