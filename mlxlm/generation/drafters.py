"""Drafters: where guesses of a text's next tokens come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from mlxlm.backend.mlx import mx
from mlxlm.cache import KVCache, KVOptions
from mlxlm.generation.context import Context, async_eval
from mlxlm.generation.loaded_model import LoadedModel
from mlxlm.utils.errors import GenerationError

CANDIDATES = 16  # places of a pair of tokens that are looked at, the latest ones
MAX_NGRAM = 32  # tokens of a suffix that are compared


class DraftState(Protocol):
    """What a drafter keeps of one text. It is told what follows the prompt, in order, as it becomes known.

    `last_draft_matched`: whether the last token read is the one that was expected; None where expecting one costs a computation.
    False is also for those that have no guesses left. `num_unread`: tokens that the next proposal has to read first.
    """

    last_draft_matched: bool | None
    num_unread: int

    def read(self, tokens: Sequence[int]) -> None:
        """`tokens` follow what was read so far."""

    def propose(self, count: int, sampler, vocab_size: int) -> mx.array | None:
        """1 to `count` ids, int32, for what follows; None for no guess. `sampler` is that of the text, after the last
        token read, and isn't advanced; `vocab_size` is the width of its logits."""

    def close(self) -> None:
        """The text ends here, or has failed."""


class Drafter(Protocol):
    def begin(self, context: Context, prompt: Sequence[int], max_tokens: int) -> DraftState:
        """Guesses for the text that follows `prompt` in `context`. Raises GenerationError where there can't be any."""

    def check(self, lm: LoadedModel) -> None:
        """Raise GenerationError where guesses can't be those of `lm`'s texts."""


def max_trimmable_tokens(context: Context, n: int) -> int:
    """Of `n` tokens to be read, how many at once can be read so that all of them could be forgotten again."""
    return max(0, min([n, *(_can_take_back(cache, n) for cache in context.caches)]))


def _can_take_back(cache, n: int) -> int:
    if isinstance(cache, KVCache):
        return n if cache.max_update_size is None else cache.max_update_size
    if not cache.is_trimmable():
        return 0
    # A rotating cache of mlx_lm can't be trimmed any more once it is full.
    longest = getattr(cache, "max_size", None)
    return n if longest is None else longest - 1 - cache.offset


class PromptLookup:
    """Guesses what followed the longest suffix of the text that it has seen before ("prompt lookup", Saxena 2023; LLMA,
    Yang et al. 2023), in the prompt or in what was generated. It needs no model and no training, and pays where a text
    repeats itself or its prompt: code, quotes, summaries, edits.

    A suffix is at least two tokens; of places with equally long ones, the latest counts.
    """

    def begin(self, context: Context, prompt: Sequence[int], max_tokens: int) -> DraftState:
        draft_state = _Lookup()
        draft_state.read(prompt)
        return draft_state

    def check(self, lm: LoadedModel) -> None:
        """Every model's texts can be looked up."""


class _Lookup:
    def __init__(self) -> None:
        self.last_draft_matched: bool | None = False
        self.num_unread = 0
        self._ids: list[int] = []
        self._places: dict[tuple[int, int], list[int]] = {}  # after each pair, the latest last
        self._place: int | None = None

    def read(self, tokens: Sequence[int]) -> None:
        ids = self._ids
        for token in tokens:
            self.last_draft_matched = self._place is not None and ids[self._place] == token
            if len(ids) >= 2:
                places = self._places.setdefault((ids[-2], ids[-1]), [])
                places.append(len(ids))
                if len(places) > CANDIDATES:
                    del places[0]
            ids.append(token)
            # Going on where the last guess was right saves the search.
            self._place = self._place + 1 if self.last_draft_matched else self._find()

    def _find(self) -> int | None:
        """The place behind the longest earlier occurrence of a suffix."""
        best, longest = None, 1
        for place in reversed(self._places.get(tuple(self._ids[-2:]), ())):
            length = self._common(place)
            if length > longest:
                best, longest = place, length
        return best

    def _common(self, place: int) -> int:
        """How many tokens before `place` equal those at the end."""
        ids, n = self._ids, 2
        while n < MAX_NGRAM and n < place and ids[place - 1 - n] == ids[-1 - n]:
            n += 1
        return n

    def propose(self, count: int, sampler, vocab_size: int) -> mx.array | None:
        if self._place is None:
            return None
        found = self._ids[self._place : self._place + count]
        period = len(found)  # what repeats up to the end is expected to go on
        while len(found) < count:
            found.append(found[-period])
        return mx.array(found, mx.int32)

    def close(self) -> None:
        pass


class DraftModel:
    """Guesses by a smaller model with the same tokenizer (Leviathan et al. 2023; Chen et al. 2023).

    It draws with the text's own sampler: its settings, its history and its noise, so that two models that agree draw
    the same tokens, at any temperature. Its key-value cache outlives a text, and is bounded as the text's is (it isn't
    quantized: it is small).
    """

    def __init__(self, lm: LoadedModel):
        self.lm = lm
        self._spare: Context | None = None

    def check(self, lm: LoadedModel) -> None:
        if self.lm.tokenizer.fingerprint != lm.tokenizer.fingerprint:
            raise GenerationError(
                f"the draft model {self.lm.path} has another tokenizer than {lm.path}",
                "a smaller model of the same family, trained with the same tokenizer",
            )

    def begin(self, context: Context, prompt: Sequence[int], max_tokens: int) -> DraftState:
        size, limit = context.kv.size, self.lm.config.max_position_embeddings
        kv = KVOptions() if size is None else KVOptions(size=min(size, limit), keep=context.kv.keep)
        own, self._spare = self._spare, None  # a second text at the same time gets one of its own
        if own is None or own.kv != kv:
            own = Context(self.lm.model, kv)
        own.trim_to_prefix(prompt, max_tokens)
        if not max_trimmable_tokens(own, 1):
            raise GenerationError(
                f"the draft model {self.lm.path} can't take tokens back",
                "a draft model with attention in all layers",
            )
        return _Drafting(own, prompt, limit if kv.size is None else None, self._returned)

    def _returned(self, context: Context) -> None:
        self._spare = context


class _Drafting:
    def __init__(
        self, context: Context, prompt: Sequence[int], limit: int | None, returned: Callable[[Context], None]
    ) -> None:
        self.last_draft_matched: bool | None = None
        self._context, self._limit, self._returned = context, limit, returned
        self._unread = list(prompt[len(context) :])
        self._guessed: mx.array | None = None  # the last proposal; the caches hold all of it but its last token

    @property
    def num_unread(self) -> int:
        return len(self._unread)

    def read(self, tokens: Sequence[int]) -> None:
        self._unread.extend(tokens[self._settle(tokens) :])

    def _settle(self, tokens: Sequence[int]) -> int:
        """Forget guesses that aren't in the text, which `tokens` continue; return how many of these are held."""
        if self._guessed is None:
            return 0
        with self._context.transaction() as ids:
            guessed, self._guessed = self._guessed, None
            ahead, kept = guessed.size - 1, 0
            for guess, token in zip(guessed[:-1].tolist() if tokens else (), tokens, strict=False):
                if guess != token:
                    break
                kept += 1
            if ahead > kept:
                for cache in self._context.caches:
                    cache.trim(ahead - kept)
            ids.extend(tokens[:kept])
        return kept

    def propose(self, count: int, sampler, vocab_size: int) -> mx.array | None:
        context, unread = self._context, self._unread
        if self._limit is not None:
            count = min(count, self._limit - len(context) - len(unread))
        if count < 1:
            self.last_draft_matched = False  # nothing more will come
            return None
        if len(unread) > 2 or max_trimmable_tokens(context, len(unread)) < len(unread):
            context.read(unread[:-1])
            del unread[:-1]
        sampler = sampler.fork()
        guessed: list[mx.array] = []
        with context.transaction() as ids:
            token = self._draw(mx.array(unread), sampler, vocab_size, guessed)
            ids.extend(unread)
            unread.clear()
            count = min(count, 1 + max_trimmable_tokens(context, count - 1))
            while len(guessed) < count and token is not None:
                token = self._draw(token, sampler, vocab_size, guessed)
            self._guessed = mx.concatenate(guessed)
        return self._guessed

    def _draw(self, tokens: mx.array, sampler, vocab_size: int, guessed: list[mx.array]) -> mx.array | None:
        """Read `tokens`, add the one drawn to `guessed`, and return it; None if nothing can follow it."""
        logits = _of_width(self._context.model(tokens[None], cache=self._context.caches)[:, -1], vocab_size)
        token = mx.maximum(sampler(logits), 0)  # logits that aren't numbers: a wrong guess
        guessed.append(async_eval(token))
        if sampler.needs_last_token:
            sampler.accept(token.item())
            if sampler.finished or sampler.error:
                return None
        return token

    def close(self) -> None:
        self._settle(())
        self._returned(self._context)


def _of_width(logits: mx.array, vocab_size: int) -> mx.array:
    """Vocabularies are padded, and not always to the same size."""
    missing = vocab_size - logits.shape[-1]
    if missing > 0:
        return mx.pad(logits, ((0, 0), (0, missing)), constant_values=-mx.inf)
    return logits[:, :vocab_size]
