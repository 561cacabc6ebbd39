"""A conversation with a model over one key-value cache. No terminal in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxlm.cache import KVOptions
from mlxlm.chat import session_files
from mlxlm.chat.answer import ChatChunk, ChatStats, chat_chunks, make_turn
from mlxlm.chat.branches import Branches, Conversation, Turn
from mlxlm.chat.chat_model import ChatModel
from mlxlm.chat.chat_template import Message
from mlxlm.chat.context_overflow import ContextOverflow, check_context_overflow, drop_oldest_turns, fit_to_context
from mlxlm.chat.session_format import Session, non_default_fields
from mlxlm.generation import GenerationOptions, GenerationResult, LoadedModel, TextStream
from mlxlm.generation.gumbel_noise import random_seed
from mlxlm.tokenizer.tokenizer import check_unicode
from mlxlm.utils.errors import GenerationError

if TYPE_CHECKING:
    from mlxlm.generation.speculative import SpeculativeDecoder


class Chat:
    """A conversation, its branches, and the cache of what the model has read of it.

        chat = Chat(lm, system_prompt="You are brief.")
        for piece in chat.ask("Hello!"):
            print(piece.text, end="")

    Each turn encodes the whole conversation and reads only what the cache doesn't begin with: with a template that
    leaves earlier messages as they are, the new message. Undo, retry, edit, branch, switch and reset change only what
    is said; the next turn trims the cache to what both have in common (a cache that drops tokens can at least go back
    to where the last question began). A template that drops the reasoning of earlier answers has its way: the last
    answer is then read again without it.

    Every answer, retries and those undone included, is drawn with the seed that follows the one before it. While an
    answer is under way, whatever else is asked of the chat ends it first, as closing its generator does: what was said
    stays.
    """

    def __init__(
        self,
        lm: LoadedModel,
        *,
        system_prompt: str | None = None,
        chat_template: str | None = None,
        context_overflow: ContextOverflow = "stop",
        kv: KVOptions | None = None,
        speculation: SpeculativeDecoder | None = None,
        **options: Any,
    ):
        """`chat_template`: see `mlxlm.chat.chat_template.chat_encoder`. `options` are the fields of GenerationOptions, with its
        defaults but for `max_tokens`: see `defaults`.

        context_overflow: what happens when the model's context has no room. "stop": `ask` raises ContextFull. "drop": the
        oldest turns go, whole ones, the system message never, until the conversation with the new message takes at
        most half of the context; this happens when less is left than the answer may have (`max_tokens`, but no more
        than a quarter of the context). A rotating cache (`kv`) bounds memory by itself and never overflows.
        `speculation` proposes tokens, which changes the speed and not the text.

        Raises TokenizerError for a chat template that is broken or isn't there, GenerationError for settings that
        can't work.
        """
        self._answering: Callable[[], Generator | None] = lambda: None  # weak: one that nobody reads has ended
        self._chat_model = ChatModel(lm, chat_template, kv or KVOptions())
        self.options = GenerationOptions.of(**{"max_tokens": self.defaults.max_tokens, **options})
        self.system_prompt = system_prompt
        self.context_overflow = context_overflow
        self.speculation = speculation
        self.notes: list[str] = []  # what a person should know of how this chat was opened
        self._branches = Branches()
        if speculation is not None:
            speculation.check(lm)
        self._answers = self._generated = 0
        self.prompt_tokens = 0  # of the last answer, also while it is under way
        self._last: GenerationResult | None = None
        self._files = session_files.SessionFiles()

    # What it consists of.

    @property
    def lm(self) -> LoadedModel:
        """The model. Another one reads the conversation as text, with its own template; it keeps the settings but a
        `logit_bias` of other tokens and a `max_tokens` that was the default of the one before. Raises as Chat does:
        the model stays then."""
        return self._chat_model.lm

    @lm.setter
    def lm(self, lm: LoadedModel) -> None:
        self._settle()
        if self.speculation is not None:
            self.speculation.check(lm)
        reader = ChatModel(lm, self._chat_model.requested_chat_template, self.kv)
        options, same_tokens = self._options, lm.tokenizer.fingerprint == self.lm.tokenizer.fingerprint
        if not same_tokens:  # the ids of another tokenizer mean nothing
            options = replace(options, logit_bias={})
        if options.max_tokens == self.defaults.max_tokens:
            options = replace(options, max_tokens=reader.defaults.max_tokens)
        reader.check(options)
        self._chat_model, self._options = reader, options
        if not same_tokens:
            self._branches.drop_ids_unless(lambda turn: False)

    @property
    def kv(self) -> KVOptions:
        """How keys and values are kept."""
        return self._chat_model.context.kv

    @property
    def chat_template(self) -> str:
        """The template in use: "model" for the model's own, a name of `mlxlm.chat.chat_formats`, "plain", or a file."""
        return self._chat_model.chat_encoder.name

    @property
    def options(self) -> GenerationOptions:
        """Of the next answer, whose seed it has; None as a seed is a drawn one. Raises GenerationError for a
        constraint, a bias or a number that this model can't serve, and changes nothing."""
        return self._options

    @options.setter
    def options(self, options: GenerationOptions) -> None:
        self._chat_model.check(options)
        self._options = replace(options, seed=random_seed()) if options.seed is None else options

    @property
    def defaults(self) -> GenerationOptions:
        """What the options are that nobody has set: GenerationOptions's, but a model with a chat template ends its
        answers itself (`max_tokens` is None)."""
        return self._chat_model.defaults

    @property
    def system_prompt(self) -> str | None:
        """The system prompt of the next turns. Raises TokenizerError for text with lone surrogates."""
        return self._system

    @system_prompt.setter
    def system_prompt(self, text: str | None) -> None:
        check_unicode(text or "")
        self._system = text or None

    @property
    def context_overflow(self) -> ContextOverflow:
        """What happens when the context is full: "stop" or "drop". Raises GenerationError for anything else."""
        return self._overflow

    @context_overflow.setter
    def context_overflow(self, policy: ContextOverflow) -> None:
        self._overflow = check_context_overflow(policy)

    # What was said.

    @property
    def messages(self) -> list[Message]:
        """The conversation of the current branch, the system message first, with what was dropped."""
        return self._messages(self._branches.current.turns)

    @property
    def dropped(self) -> int:
        """How many messages of this branch, the oldest ones, the model no longer sees."""
        return 2 * self._branches.current.dropped

    @property
    def branch_name(self) -> str:
        return self._branches.name

    @property
    def branches(self) -> dict[str, int]:
        """The number of turns in every branch."""
        return {name: len(conversation.turns) for name, conversation in self._branches.all.items()}

    @property
    def context_size(self) -> int:
        """Tokens that the model can see: its context, or what a rotating cache holds."""
        return self._chat_model.size

    @property
    def context_used(self) -> int:
        """Tokens that the conversation takes of them; 0 before the first turn."""
        visible_turns = self._branches.current.visible_turns
        return self._chat_model.count_tokens(self._messages(visible_turns)) if visible_turns else 0

    @property
    def caches(self) -> list:
        """The key-value caches, one per layer, of what the model has read."""
        return self._chat_model.context.caches

    def token_counts(self) -> list[int]:
        """Tokens of the text of each of `messages`, an answer's as generated; what the template adds isn't counted."""
        encode = self.lm.tokenizer.encode
        return [len(m.ids or encode(m.content, add_special_tokens=False)) for m in self.messages]

    @property
    def stats(self) -> ChatStats:
        return ChatStats(self._answers, self._generated, self._chat_model.context.nbytes, self._last)

    # What can be done.

    def ask(self, text: str, *, on_prefill: Callable[[int], None] | None = None) -> Generator[ChatChunk, None, None]:
        """Answer a message. Closing the generator stops the answer: what was said stays in the conversation.

        A message whose answer is stopped before its first token is forgotten. `on_prefill` is that of
        `generate_tokens`. Raises, before anything is computed, GenerationError for an empty message, ContextFull for
        a conversation that has outgrown the model's context; TokenizerError if the template refuses it.
        """
        self._settle()
        return self._ask(self._branches.current, text, on_prefill)

    def retry(self, *, on_prefill: Callable[[int], None] | None = None) -> Generator[ChatChunk, None, None]:
        """Answer the last message again, with the next seed. The old answer goes with the new one's first token.

        Raises as `ask` does, and GenerationError where there is none.
        """
        self._settle()
        base = self._branches.current.without_last_turn()
        return self._ask(base, self._branches.current.turns[-1].question, on_prefill)

    def edit(self, text: str, *, on_prefill: Callable[[int], None] | None = None) -> Generator[ChatChunk, None, None]:
        """Say `text` instead of the last message, and answer it. Both old ones go with the new answer's first token.

        Raises as `ask` does, and GenerationError where there is no message.
        """
        self._settle()
        return self._ask(self._branches.current.without_last_turn(), text, on_prefill)

    def undo(self) -> Turn:
        """Forget the last message and its answer, and return them. Once the model sees none of those before, it sees
        all of them again, also what was dropped. Raises GenerationError where there is no message."""
        self._settle()
        shorter = self._branches.current.without_last_turn()
        turn = self._branches.current.turns[-1]
        self._branches.current = shorter if shorter.visible_turns else Conversation(shorter.turns)
        return turn

    def branch(self, name: str | None = None) -> str:
        """Go on in a new branch, while the current one stays as it is; return the new one's name.

        Raises GenerationError for a name that is taken or isn't one word.
        """
        self._settle()
        return self._branches.fork(name)

    def switch(self, name: str) -> None:
        """Go on in another branch. Raises GenerationError if there is none of this name."""
        self._settle()
        self._branches.switch(name)

    def reset(self) -> None:
        """Forget the conversation with all its branches, not the system prompt."""
        self._settle()
        self._branches = Branches()

    def drop_oldest(self, for_message: str = "") -> int:
        """Make room for a message as the policy "drop" does, now; without one, for the last message to be asked again.
        Return how many messages the model no longer sees; they stay in `messages` and in a session file.

        Raises ContextFull for a message too long by itself.
        """
        self._settle()
        before, conversation = self.dropped, self._branches.current
        if not for_message and conversation.turns:
            for_message, conversation = conversation.turns[-1].question, conversation.without_last_turn()
        shorter, _ = drop_oldest_turns(conversation, self._prompt_with(for_message), self._chat_model.limit)
        self._see_only(shorter)
        return self.dropped - before

    def save(self, path: Path | str, *, cache: bool = False) -> None:
        """Write a session file (see `mlxlm.chat.session_format`), as a whole or not at all.

        A file that is there is replaced only if this chat read or wrote it and nobody has changed it since.
        cache: also write `session_files.cache_path(path)`, so that `open` needn't read the conversation again.
        Raises GenerationError for another file in its place, and where the disk refuses; CheckpointError for a cache
        that can't be written (of a model with caches of its own kind): the session is written by then.
        """
        self._settle()
        weights, tokenizer = session_files.model_fingerprints(self.lm)
        session = Session(
            str(self.lm.path),
            weights,
            tokenizer,
            self._chat_model.requested_chat_template,
            self._system,
            self._overflow,
            non_default_fields(self._options, self.defaults),
            self.kv,
            self._branches,
        )
        self._files.write(Path(path), session, self._chat_model.context if cache else None, self.lm)

    @classmethod
    def open(
        cls,
        path: Path | str,
        lm: LoadedModel,
        *,
        chat_template: str | None = None,
        context_overflow: ContextOverflow | None = None,
        kv: KVOptions | None = None,
        speculation: SpeculativeDecoder | None = None,
        **options: Any,
    ) -> Chat:
        """The chat in a session file, which goes on as if it had never been left; what is given here counts instead of
        what the file says.

        Without a cache beside it, or with one that can't be used, the next turn reads the conversation again. That
        gives the same tokens wherever rounding doesn't decide: a prompt is computed many tokens at once. With
        another model than the file's, the chat goes on as text. `notes` tells whatever of this is so.
        Raises GenerationError naming path and line for a file that is no session, and as `Chat` does.
        """
        path, files = Path(path), session_files.SessionFiles()
        found = session_files.found(files.read(path), path, lm, chat_template)
        given = {"chat_template": chat_template, "context_overflow": context_overflow, "kv": kv}
        given = {name: value for name, value in given.items() if value is not None}
        chat = cls(lm, speculation=speculation, **{**found.settings, **options, **given})
        chat._files, chat._branches, chat.notes = files, found.branches, found.notes
        if found.same_model and (problem := session_files.read_cache(path, chat._chat_model.context, lm)):
            chat.notes.append(problem)
        return chat

    # How.

    def _settle(self) -> None:
        """End the answer that is under way."""
        answering = self._answering()
        if answering is not None:
            answering.close()

    def _messages(self, turns: Sequence[Turn]) -> list[Message]:
        system_prompt = [Message("system", self._system)] if self._system else []
        return system_prompt + [message for turn in turns for message in turn.messages]

    def _prompt_with(self, question: str) -> Callable[[Conversation], list[int]]:
        return lambda conversation: self._chat_model.prompt(self._messages(conversation.visible_turns), question)

    def _see_only(self, shorter: Conversation) -> None:
        """The current conversation loses the turns that were dropped from this one."""
        self._branches.current = replace(self._branches.current, dropped=shorter.dropped)

    def _ask(
        self, conversation: Conversation, question: str, on_prefill: Callable[[int], None] | None
    ) -> Generator[ChatChunk, None, None]:
        if not question:
            raise GenerationError("the message is empty", "some text")
        conversation, prompt = fit_to_context(
            conversation, self._prompt_with(question), self._chat_model.limit, self._overflow, self._options.max_tokens
        )
        self._see_only(conversation)
        self.prompt_tokens = len(prompt)
        earlier = self._messages(conversation.visible_turns)
        answer = self._chat_model.answer(earlier, prompt, self._options, self.speculation, on_prefill)
        answering = self._answer(conversation, question, prompt, answer)
        self._answering = weakref.ref(answering)
        return answering

    def _answer(
        self, conversation: Conversation, question: str, prompt: list[int], answer: TextStream
    ) -> Generator[ChatChunk, None, None]:
        try:
            yield from chat_chunks(answer, self._chat_model.chat_encoder.generation_prefix)
        finally:
            answer.close()
            result = answer.result
            if result.tokens:
                self._branches.current = conversation.with_turn(make_turn(question, prompt, result, self._chat_model))
                if self._options.seed == result.seed:  # none was set meanwhile
                    self._options = replace(self._options, seed=(result.seed + 1) % 2**64)
                self._answers += 1
                self._generated += len(result.tokens)
                self._last = result
