"""Drafters of speculative decoding: they guess a text's next tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from mlxlm.backend.mlx import mx, nn
from mlxlm.cache import KVCache, KVOptions
from mlxlm.cache.recurrent_cache import MAX_UNDO, RecurrentCache
from mlxlm.generation.context import Context
from mlxlm.generation.device_memory import async_eval
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.generation.sampling import Sampler
from mlxlm.utils.errors import GenerationError

MAX_CANDIDATES = 16  # positions after a pair of tokens that are compared, the latest ones
MAX_NGRAM = 32  # tokens of a suffix that are compared


class DraftState(Protocol):
    """A drafter's state for one text.

    Attributes:
        last_draft_matched: Whether the last token read is the one that was expected. False also if no more drafts will
            come. None if expecting a token costs a computation.
    """

    last_draft_matched: bool | None

    @property
    def is_behind(self) -> bool:
        """Whether the next draft has more tokens to read first than after a round."""

    def read(self, tokens: Sequence[int], hidden_states: mx.array | None = None) -> None:
        """Append the next `tokens` of the text.

        Args:
            tokens: Token ids.
            hidden_states: Those of the model from which the tokens were drawn, `[n, hidden]`, if it has them.
        """

    def propose(self, count: int, sampler: Sampler, vocab_size: int) -> mx.array | None:
        """Draft the next tokens.

        Args:
            count: The maximum number of tokens.
            sampler: That of the text, after the last token read; not advanced.
            vocab_size: The width of the text's logits.

        Returns:
            1 to `count` ids, int32; None for no draft.
        """

    def close(self) -> None:
        """End the text."""


class Drafter(Protocol):
    """Where drafts come from."""

    def begin(self, model: nn.Module, kv: KVOptions, prompt: Sequence[int]) -> DraftState:
        """Start to draft the text of `model` after `prompt`, whose caches have the options `kv`.

        Raises:
            GenerationError: That is impossible.
        """

    def check(self, lm: LoadedModel) -> None:
        """Raise GenerationError if the drafts can't be used for `lm`."""


def max_trimmable_tokens(caches: Sequence[Any], n: int) -> int:
    """How many of the next `n` tokens can be read at once so that all of them could be trimmed again."""
    return max(0, min([n, *(_max_trimmable(cache, n) for cache in caches)]))


def _max_trimmable(cache: Any, n: int) -> int:
    if isinstance(cache, KVCache):
        return n if cache.max_update_size is None else cache.max_update_size
    if isinstance(cache, RecurrentCache):
        return cache.max_partial
    if not cache.is_trimmable():
        return 0
    # A rotating cache of mlx_lm can no longer be trimmed once it is full.
    max_size = getattr(cache, "max_size", None)
    return n if max_size is None else max_size - 1 - cache.offset


class PromptLookup:
    """Drafts what followed the longest earlier occurrence of the text's suffix, in the prompt or the generated text.

    Prompt lookup decoding (Saxena 2023; LLMA, Yang et al. 2023). It needs no model, and pays if a text repeats itself
    or its prompt: code, quotes, summaries, edits. A suffix has at least two tokens; of equally long matches, the latest
    counts.
    """

    def begin(self, model: nn.Module, kv: KVOptions, prompt: Sequence[int]) -> DraftState:
        """Start with the n-grams of the prompt."""
        state = _PromptLookupState()
        state.read(prompt)
        return state

    def check(self, lm: LoadedModel) -> None:
        """Accept every model."""


class _PromptLookupState:
    def __init__(self) -> None:
        self.last_draft_matched: bool | None = False
        self.is_behind = False
        self._ids: list[int] = []
        self._positions: dict[tuple[int, ...], list[int]] = {}  # the positions after each pair, the latest last
        self._match = 0  # the position after the matched suffix; 0 for none

    def read(self, tokens: Sequence[int], hidden_states: mx.array | None = None) -> None:
        ids = self._ids
        for token in tokens:
            self.last_draft_matched = self._match > 0 and ids[self._match] == token
            if len(ids) >= 2:
                positions = self._positions.setdefault((ids[-2], ids[-1]), [])
                positions.append(len(ids))
                if len(positions) > MAX_CANDIDATES:
                    del positions[0]
            ids.append(token)
            # Staying with a match that was right saves the search.
            self._match = self._match + 1 if self.last_draft_matched else self._find_match()

    def _find_match(self) -> int:
        """The position after the longest earlier occurrence of a suffix; 0 for none."""
        best, longest = 0, 1
        for position in reversed(self._positions.get(tuple(self._ids[-2:]), ())):
            length = self._match_length(position)
            if length > longest:
                best, longest = position, length
        return best

    def _match_length(self, position: int) -> int:
        """How many tokens before `position` equal the last ones."""
        ids, n = self._ids, 2
        while n < MAX_NGRAM and n < position and ids[position - 1 - n] == ids[-1 - n]:
            n += 1
        return n

    def propose(self, count: int, sampler: Sampler, vocab_size: int) -> mx.array | None:
        if not self._match:
            return None
        draft = self._ids[self._match : self._match + count]
        period = len(draft)  # a repetition up to the end of the text is expected to continue
        while len(draft) < count:
            draft.append(draft[-period])
        return mx.array(draft, mx.int32)

    def close(self) -> None:
        pass


class DraftModel:
    """Drafts by a smaller model with the same tokenizer (Leviathan et al. 2023; Chen et al. 2023).

    It samples with the text's own settings, history and noise, so that two models that agree draw the same tokens at
    any temperature. Its key-value cache outlives a text, and has the size of the text's. It is not quantized, since it
    is small.
    """

    def __init__(self, lm: LoadedModel):
        self.lm = lm
        self._idle_context: Context | None = None

    def check(self, lm: LoadedModel) -> None:
        """Raise GenerationError if the tokenizers differ."""
        if self.lm.tokenizer.fingerprint != lm.tokenizer.fingerprint:
            raise GenerationError(
                f"the draft model {self.lm.path} has another tokenizer than {lm.path}",
                "a smaller model of the same family, trained with the same tokenizer",
            )

    def begin(self, model: nn.Module, kv: KVOptions, prompt: Sequence[int]) -> DraftState:
        """Start to draft a text. Raises GenerationError if the draft model's cache can't be trimmed."""
        context_length = self.lm.config.max_position_embeddings
        kv = KVOptions() if kv.size is None else KVOptions(size=min(kv.size, context_length), keep=kv.keep)
        draft_context, self._idle_context = self._idle_context, None  # a concurrent text makes its own
        if draft_context is None or draft_context.kv != kv:
            draft_context = Context(self.lm.model, kv)
        draft_context.trim_to_prefix(prompt)
        if not max_trimmable_tokens(draft_context.caches, 1):
            raise GenerationError(
                f"the cache of the draft model {self.lm.path} can't be trimmed",
                "a draft model that mlxlm runs itself",
            )
        return _DraftModelState(draft_context, prompt, context_length if kv.size is None else None, self._release)

    def _release(self, context: Context) -> None:
        self._idle_context = context


class _DraftModelState:
    def __init__(
        self, context: Context, prompt: Sequence[int], limit: int | None, release: Callable[[Context], None]
    ) -> None:
        """`limit`: the model's context length; None if the cache rotates. `release` gets the context at the end."""
        self.last_draft_matched: bool | None = None
        self._context, self._limit, self._release = context, limit, release
        self._unread = list(prompt[len(context) :])
        self._draft: mx.array | None = None  # the last draft; the caches hold it except for its last token

    @property
    def is_behind(self) -> bool:
        return len(self._unread) > 2  # the last token of a draft that was accepted, and the one after it

    def read(self, tokens: Sequence[int], hidden_states: mx.array | None = None) -> None:
        self._unread.extend(tokens[self._trim_draft(tokens) :])

    def _trim_draft(self, tokens: Sequence[int]) -> int:
        """Trim the draft to its common prefix with `tokens`, which follow in the text; return the prefix's length."""
        if self._draft is None:
            return 0
        with self._context.transaction() as ids:
            draft, self._draft = self._draft, None
            num_held, num_matched = draft.size - 1, 0
            for guess, token in zip(draft[:-1].tolist() if tokens else (), tokens, strict=False):
                if guess != token:
                    break
                num_matched += 1
            if num_held > num_matched:
                for cache in self._context.caches:
                    cache.trim(num_held - num_matched)
            ids.extend(tokens[:num_matched])
        return num_matched

    def propose(self, count: int, sampler: Sampler, vocab_size: int) -> mx.array | None:
        context, unread = self._context, self._unread
        if self._limit is not None:
            count = min(count, self._limit - len(context) - len(unread))
        if count < 1:
            self.last_draft_matched = False  # no more drafts will come
            return None
        if len(unread) > 2 or max_trimmable_tokens(context.caches, len(unread)) < len(unread):
            context.read(unread[:-1])
            del unread[:-1]
        sampler = sampler.fork()
        draft: list[mx.array] = []
        with context.transaction() as ids:
            token = self._sample(mx.array(unread), sampler, vocab_size, draft)
            ids.extend(unread)
            unread.clear()
            count = min(count, 1 + max_trimmable_tokens(context.caches, count - 1))
            for cache in context.caches:
                if isinstance(cache, RecurrentCache):
                    cache.max_undo = max(MAX_UNDO, count)
            while len(draft) < count and token is not None:
                token = self._sample(token, sampler, vocab_size, draft)
            self._draft = mx.concatenate(draft)
        return self._draft

    def _sample(self, tokens: mx.array, sampler: Sampler, vocab_size: int, draft: list[mx.array]) -> mx.array | None:
        """Read `tokens`, append the next token to `draft` and return it; None if nothing can follow it."""
        logits = _pad_vocab(self._context.model(tokens[None], cache=self._context.caches)[:, -1], vocab_size)
        draft.append(sample_draft(logits, sampler))
        return None if sampler.needs_last_token and sampler.ended else draft[-1]

    def close(self) -> None:
        self._trim_draft(())
        self._release(self._context)


def sample_draft(logits: mx.array, sampler: Sampler) -> mx.array:
    """Draw a token, int32 `[1]`, from logits `[1, V]` with a fork of the text's sampler; being computed."""
    token = mx.maximum(sampler(logits), 0)  # logits that aren't finite give a wrong guess
    async_eval(token)
    if sampler.needs_last_token:
        sampler.accept(token.item())
    return token


def _pad_vocab(logits: mx.array, vocab_size: int) -> mx.array:
    """Logits of width `vocab_size`: vocabularies are padded, and not always to the same size."""
    missing = vocab_size - logits.shape[-1]
    if missing > 0:
        return mx.pad(logits, ((0, 0), (0, missing)), constant_values=-mx.inf)
    return logits[:, :vocab_size]
