"""The decoding loop: a step computes the next token of each row of a batch; with a draft, several tokens."""

from __future__ import annotations

from array import array
from collections.abc import Generator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mlxlm.backend.mlx import mx
from mlxlm.cache import PREFILL_STEP_SIZE, KVCache, KVOptions
from mlxlm.generation.context import UNLIMITED, Context, can_trim
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.generation.device_memory import CLEAR_CACHE_INTERVAL, async_eval, clear_memory_cache, wired_limit
from mlxlm.generation.options import GenerationOptions
from mlxlm.generation.sampling import Sampler, SamplerSnapshot, sample_with_certainty
from mlxlm.generation.speculative import Draft, Drafting


class Row:
    """The tokens of one text, which its sampler draws.

    Attributes:
        prompt: The ids of the prompt.
        sampler: Draws the tokens.
        limit: The maximum number of tokens.
        tokens: The tokens so far, int32.
        finished: Whether the text has ended.
        reread_at: The length of prompt and text at which all of it has to be read again, as with "longrope".
        num_held: How many tokens the caches hold; more than the text has, if it ended before a pass was read.
        is_fed: Whether the token that the next step feeds is already part of the text or its prompt.
        idle_steps: Steps since the end.
    """

    sampler: Sampler

    def __init__(self, prompt: Sequence[int], limit: int):
        self.prompt, self.limit, self.tokens = list(prompt), limit, array("i")
        self.finished, self.reread_at = False, UNLIMITED
        self.num_held, self.is_fed, self.idle_steps = 0, True, 0

    def __len__(self) -> int:
        """The number of tokens of prompt and text."""
        return len(self.prompt) + len(self.tokens)

    @property
    def remaining(self) -> int:
        """How many more tokens the text may have."""
        return self.limit - len(self.tokens)

    @property
    def room(self) -> int:
        """How many more tokens it may have with these caches."""
        return min(self.remaining, self.reread_at - len(self))

    @property
    def last_token(self) -> int:
        """The last token of prompt and text."""
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    @property
    def ids(self) -> list[int]:
        """The tokens of prompt and text."""
        return self.prompt + self.tokens.tolist()

    def accept(self, token: int) -> None:
        """Append a token that `sampler` drew. Raises GenerationError for logits that were not finite."""
        self.sampler.accept(token)
        self.tokens.append(token)
        self.finished = self.remaining <= 0


AnyRow = TypeVar("AnyRow", bound=Row)


@dataclass
class _Pass:
    """What the last pass draws; possibly not computed yet.

    Attributes:
        tokens: A token for every row, int32 `[B]`; after a draft of k tokens `[k + 1]` for the only row.
        certain: Whether rounding can't change them, bool like `tokens`; None if a row was computed alone.
        snapshots: The state of each row's sampler before the draw; None if it doesn't need to be restored.
        draft: The drafted tokens that were read.
        hidden_states: Those of the model from which the tokens are drawn, `[B, hidden]` or `[k + 1, hidden]`, if a
            drafter may read them.
        timed: Whether its time says what such a pass costs.
    """

    tokens: mx.array
    certain: mx.array | None
    snapshots: list[SamplerSnapshot | None]
    draft: Draft | None = None
    hidden_states: mx.array | None = None
    timed: bool = False

    @classmethod
    def of_last_tokens(cls, rows: Sequence[Row]) -> _Pass:
        return cls(mx.array([row.last_token for row in rows], mx.int32), None, [None] * len(rows))

    def append(self, other: _Pass) -> None:
        if self.certain is not None or other.certain is not None:
            self.certain = mx.concatenate([self._all_certain(), other._all_certain()])
        self.tokens = mx.concatenate([self.tokens, other.tokens])
        self.snapshots = [*self.snapshots, *other.snapshots]

    def replace(self, rows: Sequence[int], other: _Pass) -> None:
        index = mx.array(rows)
        if self.certain is not None or other.certain is not None:
            self.certain = mx.put_along_axis(self._all_certain(), index, other._all_certain(), axis=0)
        self.tokens = mx.put_along_axis(self.tokens, index, other.tokens, axis=0)
        for row, snapshot in zip(rows, other.snapshots, strict=True):
            self.snapshots[row] = snapshot

    def select(self, rows: Sequence[int]) -> None:
        index = mx.array(rows)
        self.tokens = self.tokens[index]
        self.certain = None if self.certain is None else self.certain[index]
        self.snapshots = [self.snapshots[row] for row in rows]

    def _all_certain(self) -> mx.array:
        return mx.ones(len(self.snapshots), mx.bool_) if self.certain is None else self.certain


class Batch(Generic[AnyRow]):
    """Texts that are decoded together, with their caches stacked.

    Step t+1 is dispatched before the tokens of step t are read, so that the device never waits for Python. With a
    constraint, only its forward pass is: the draw needs the tokens before. So does a draft.

    A finished row keeps computing, and its tokens are dropped, until `remove_finished` removes it, which copies the
    caches of all others.

    Logits of several rows differ in their last bits from those of one row. With a margin, where that could change the
    drawn token, a step of that row alone decides: so a text is the one that its request gives alone.

    Args:
        step: The model's decoding step.
        context_length: The number of positions of the model.
        margin: As for `sample_with_certainty`.
        drafting: Speculative decoding of a batch that has a single row.
    """

    def __init__(self, step: DecodeStep, context_length: int, margin: float | None, drafting: Drafting | None = None):
        self._step, self._context_length, self._margin, self._drafting = step, context_length, margin, drafting
        self.rows: list[AnyRow] = []
        self.caches: list[Any] = []
        self._last = _Pass.of_last_tokens([])
        self.num_steps = self._vocab_size = 0

    @property
    def active_rows(self) -> list[AnyRow]:
        """The unfinished rows."""
        return [row for row in self.rows if not row.finished]

    @property
    def idle_steps(self) -> int:
        """Steps of finished rows since they finished, all rows together."""
        return sum(row.idle_steps for row in self.rows if row.finished)

    @property
    def length(self) -> int:
        """Tokens of the longest unfinished text."""
        return max((len(row) for row in self.active_rows), default=0)

    @property
    def num_held(self) -> int:
        """How many tokens the caches hold of the longest row, finished or not."""
        return max((row.num_held for row in self.rows), default=0)

    @property
    def capacity(self) -> int:
        """Positions of the largest cache."""
        return max((cache.capacity for cache in self.caches if isinstance(cache, KVCache)), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of the caches."""
        return sum(cache.nbytes for cache in self.caches)

    def step(self) -> int:
        """Dispatch the next pass, and read the tokens of the one before. Returns how many tokens of texts were read.

        A row that finishes stays, with no `idle_steps`, unless its caches hold another token than its last one.
        """
        if any(row.finished and len(row) + row.idle_steps >= self._context_length for row in self.rows):
            self.remove_finished()  # the model has no positions beyond its context
        last, active, logits = self._last, self.active_rows, None
        needs_last_token = any(row.sampler.needs_last_token for row in active)
        continues = any(row.is_fed or row.room > 1 for row in active)
        if continues and not self._waits_for_draft():
            logits = self._forward(last.tokens)
            if needs_last_token:
                async_eval(logits)
            else:
                self._last = self._draw(logits)
        num_read, alone = self._read(last, logits is not None)
        if alone:
            keep = [i for i, row in enumerate(self.rows) if row not in alone]
            logits = None if logits is None else logits[mx.array(keep)] if keep else None
            self._keep(keep)
        if needs_last_token and logits is not None:
            self._last = self._draw(logits)
        for row, caches in alone.items():
            if not row.finished:
                self.join([row], caches)
        if self._drafting is not None:
            self._drafting.record_time(0 if last.draft is None else last.draft.tokens.size, last.timed)
            if self._last is not last:
                self._last.timed = num_read > 0
            elif self.rows[0].room > 0 and not self.rows[0].finished:
                self._last = self._dispatch_draft(self._drafting, self.rows[0])
        if self._last is last:  # nothing is on its way
            self._last = _Pass.of_last_tokens(self.rows)
        self.num_steps += 1
        if self.num_steps % CLEAR_CACHE_INTERVAL == 0:
            clear_memory_cache()
        return num_read

    def _forward(self, tokens: mx.array) -> mx.array:
        """Logits `[B, V]` after one more token per row, int32 `[B]`."""
        for row in self.rows:
            row.num_held += 1
        logits = self._step(tokens[:, None], self.caches)
        self._vocab_size = logits.shape[-1]
        return logits

    def _draw(self, logits: mx.array) -> _Pass:
        """The next token of each row, 0 for a finished row, from logits `[B, V]`; being computed."""
        active = [i for i, row in enumerate(self.rows) if not row.finished]
        snapshots: list[SamplerSnapshot | None] = [None] * len(self.rows)
        if not active:
            return _Pass(mx.zeros(len(self.rows), mx.int32), None, snapshots)
        samplers = [self.rows[i].sampler for i in active]
        for i, sampler in zip(active, samplers, strict=True):
            snapshots[i] = sampler.snapshot()
        everyone = len(active) == len(self.rows)
        indices = mx.array(active)
        margin = self._margin if len(self.rows) > 1 else None
        tokens, certain = sample_with_certainty(samplers, logits if everyone else logits[indices], margin)
        group = self._step.process_group  # whose sums may differ in their last bits from rank to rank
        tokens, certain = group.from_rank_0(tokens), certain if certain is None else group.from_rank_0(certain)
        if not everyone:
            tokens = mx.put_along_axis(mx.zeros(len(self.rows), mx.int32), indices, tokens, axis=0)
            if certain is not None:
                certain = mx.put_along_axis(mx.ones(len(self.rows), mx.bool_), indices, certain, axis=0)
        async_eval(tokens if certain is None else (tokens, certain))
        hidden_states = None if self._drafting is None else self._step.hidden_states
        return _Pass(tokens, certain, snapshots, hidden_states=hidden_states)

    def _read(self, last: _Pass, fed: bool) -> tuple[int, dict[AnyRow, list[Any]]]:
        """Append the tokens of `last` to their texts.

        Args:
            last: The pass.
            fed: Whether a pass over its tokens was dispatched.

        Returns:
            How many tokens were read, and rows whose token was decided alone and is another one, with the caches of
            their own that hold all tokens but it.
        """
        num_read, alone = 0, {}
        if last.draft is None:
            drawn = [[token] for token in last.tokens.tolist()]
            certain = None if last.certain is None else last.certain.tolist()
        else:
            drawn, certain = [self._read_draft(last.draft, last)], None
        for i, (row, tokens) in enumerate(zip(self.rows, drawn, strict=True)):
            if row.finished:
                row.idle_steps += 1
                continue
            if row.is_fed:
                row.is_fed = False
                continue
            if certain is not None and not certain[i] and last.snapshots[i] is not None:
                tokens[0], caches = self._decide_alone(i, tokens[0], last.snapshots[i], fed)
                if caches:
                    alone[row] = caches
            if self._drafting is not None and last.draft is None:
                self._drafting.read_token(tokens[0], last.hidden_states)
            for token in tokens:
                row.accept(token)
                num_read += 1
                if row.finished:
                    break
        return num_read, alone

    def _decide_alone(self, index: int, token: int, before: Any, fed: bool) -> tuple[int, list[Any]]:
        """Draw `token` of a row again, from a step of that row alone.

        Returns:
            The token; if it is another one, caches that hold everything before it.
        """
        row, surplus = self.rows[index], 2 if fed else 1
        caches = [cache.row(index) for cache in self.caches]
        if not all(cache.can_trim(surplus) for cache in caches):
            return token, []
        for cache in caches:
            cache.trim(surplus)
        logits = self._step(mx.array([[row.last_token]], mx.int32), caches)
        trial = row.sampler.fork()
        trial.restore(before)
        from_rank_0 = self._step.process_group.from_rank_0
        if from_rank_0(trial(logits)).item() == token:
            return token, []
        row.sampler.restore(before)
        return from_rank_0(row.sampler(logits)).item(), caches

    def _waits_for_draft(self) -> bool:
        """Whether the next pass needs the tokens of the last one first, since it may read a draft after them."""
        if self._drafting is None or self.rows[0].is_fed:
            return False
        return self._last.draft is not None or self._drafting.next_length(self.caches, self.rows[0].num_held) > 0

    def _dispatch_draft(self, drafting: Drafting, row: AnyRow) -> _Pass:
        """Dispatch a pass over the last token of the only row, with a draft after it if that pays."""
        proposed = drafting.propose(self.caches, row.num_held, row.room, row.sampler, self._vocab_size)
        if proposed is None:
            return self._draw(self._forward(mx.array([row.last_token], mx.int32)))
        tokens = mx.concatenate([mx.array([row.last_token], mx.int32), proposed])
        row.num_held += tokens.size
        logits = self._step(tokens[None], self.caches)
        if row.sampler.needs_last_token:
            async_eval(logits)  # while the tokens that the constraint allows are computed
        hidden_states = self._step.hidden_states
        sampled, certain = row.sampler.verify_draft(logits, proposed, self._margin)
        async_eval(sampled if certain is None else (sampled, certain))
        return _Pass(sampled, certain, [None], Draft(proposed, logits), hidden_states, timed=drafting.is_timed)

    def _read_draft(self, draft: Draft, last: _Pass) -> list[int]:
        """The tokens that a pass over a draft decides; the caches then hold all of them but the last."""
        assert self._drafting is not None
        row = self.rows[0]
        tokens, surplus = self._drafting.read_draft(draft, last.tokens, last.certain, row.sampler, last.hidden_states)
        row.num_held -= surplus
        for cache in self.caches if surplus else ():
            cache.trim(surplus)
        return tokens

    def close(self) -> None:
        """End the drafts, when the texts have ended or go on elsewhere."""
        if self._drafting is not None:
            self._drafting.close()
            self._drafting = None

    # Rows come and go.

    def join(self, rows: Sequence[AnyRow], caches: list[Any]) -> None:
        """Add rows, with stacked caches that hold all of their tokens but the last."""
        for row in rows:
            row.is_fed, row.num_held = True, len(row) - 1
        self._append(rows, caches, _Pass.of_last_tokens(rows))

    def merge(self, other: Batch[AnyRow]) -> None:
        """Add the rows of another batch, which must not be used afterwards.

        If possible they take the places of finished rows, since otherwise the caches of all rows are copied.
        """
        if not self.has_places_for(other):
            self.remove_finished()
            other.remove_finished()
            self._append(other.rows, other.caches, other._last)
            return
        places = self._finished_places(len(other.rows))
        for mine, theirs in zip(self.caches, other.caches, strict=True):
            mine.replace_rows(places, theirs)
        self._last.replace(places, other._last)
        for place, row in zip(places, other.rows, strict=True):
            self.rows[place] = row

    def has_places_for(self, other: Batch[AnyRow]) -> bool:
        """Whether there are enough finished rows that the rows of `other` can replace."""
        return len(self._finished_places(len(other.rows))) == len(other.rows) and all(
            hasattr(mine, "can_replace_rows") and mine.can_replace_rows(theirs)
            for mine, theirs in zip(self.caches, other.caches, strict=True)
        )

    def _finished_places(self, count: int) -> list[int]:
        return [i for i, row in enumerate(self.rows) if row.finished][:count]

    def _append(self, rows: Sequence[AnyRow], caches: list[Any], last: _Pass) -> None:
        if self.rows:
            caches = [type(old).merge([old, new]) for old, new in zip(self.caches, caches, strict=True)]
            self._last.append(last)
        else:
            self._last = last
        self.rows, self.caches = [*self.rows, *rows], caches

    def remove_finished(self) -> None:
        """Remove the finished rows."""
        self._keep([i for i, row in enumerate(self.rows) if not row.finished])

    def take_out(self, row: AnyRow) -> tuple[list[int], list[Any]]:
        """Remove a row, layer by layer, so that memory never holds two copies of it.

        If it joins again, a token that was drawn and not read yet will be drawn again.

        Returns:
            As `row_caches`, but nothing else has these arrays.
        """
        index = self.rows.index(row)
        if (before := self._last.snapshots[index]) is not None:
            row.sampler.restore(before)
        ids, caches = self.row_caches(row)
        others = [i for i in range(len(self.rows)) if i != index]
        for layer, cache in enumerate(self.caches if others else ()):
            if caches:
                caches[layer] = caches[layer].compact_copy()
                mx.eval(caches[layer].state)
            cache.select(others)
            mx.eval(cache.state)
        self._forget_others(others)
        return ids, caches

    def _keep(self, rows: list[int]) -> None:
        if len(rows) == len(self.rows):
            return
        for cache in self.caches if rows else ():
            cache.select(rows)
        self._forget_others(rows)

    def _forget_others(self, rows: list[int]) -> None:
        self.rows = [self.rows[i] for i in rows]
        if rows:
            self._last.select(rows)
        else:
            self.caches, self._last = [], _Pass.of_last_tokens([])  # frees memory for the next prompts

    def row_caches(self, row: AnyRow) -> tuple[list[int], list[Any]]:
        """What the caches hold of a row: its tokens, and one-row caches that share arrays with those of the batch."""
        index, ids = self.rows.index(row), row.ids
        caches = [cache.row(index) for cache in self.caches] if len(self.rows) > 1 else self.caches
        surplus = row.num_held - len(ids)
        if surplus > 0:
            if not all(can_trim(cache, surplus) for cache in caches):
                return [], []
            caches = [cache.copy() if hasattr(cache, "copy") else copy(cache) for cache in caches]
            for cache in caches:
                cache.trim(surplus)
        return ids[: row.num_held], caches


def greedy_tokens(
    step: DecodeStep,
    prompt: Sequence[int],
    count: int,
    *,
    kv: KVOptions | None = None,
    prefill_step_size: int = PREFILL_STEP_SIZE,
) -> Generator[int]:
    """Yield the `count` most likely tokens after `prompt`, one by one. `Engine` serves requests.

    Args:
        step: The model's decoding step.
        prompt: At least one id.
        count: At least 1.
        kv: Options of the caches.
        prefill_step_size: The maximum number of tokens of the prompt that are read at once.
    """
    row = Row(prompt, count)
    row.sampler = Sampler(GenerationOptions(temperature=0), row.prompt, 0)
    batch: Batch[Row] = Batch(step, UNLIMITED, None)
    with wired_limit():
        while not row.finished:
            if row.room == 0:
                batch.take_out(row)
            if not batch.rows:
                context = Context(step.model, kv)
                context.trim_to_prefix(row.ids)
                context.read(row.ids[:-1], prefill_step_size)
                row.reread_at = context.reread_at(len(row))
                batch.join([row], context.caches)
            num_tokens = len(row.tokens)
            batch.step()
            yield from row.tokens[num_tokens:]
