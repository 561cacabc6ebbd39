"""The rows of a batch: texts that are decoded together, one token each per step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from mlxlm.backend.mlx import mx
from mlxlm.cache import KVCache
from mlxlm.generation.decode_step import DecodeStep
from mlxlm.generation.device_memory import async_eval, clear_memory_cache_at
from mlxlm.generation.sampling import SamplerSnapshot, sample_with_certainty
from mlxlm.generation.sequence import TokenSequence
from mlxlm.generation.text_stream import Channel
from mlxlm.utils.errors import MlxlmError


@dataclass(eq=False)
class Row:
    """One text of a batch.

    Attributes:
        channel: Passes the text to its reader.
        text: The text so far.
        finished: Whether the text has ended.
        idle_steps: Steps since then.
        is_read: Whether the token that the next step feeds is already part of the text or its prompt.
        is_counted: Whether the statistics include its prompt.
        number: Later requests have larger numbers.
    """

    channel: Channel
    text: TokenSequence
    finished: bool = False
    idle_steps: int = 0
    is_read: bool = True
    is_counted: bool = False
    number: int = field(default_factory=count().__next__)

    def set_num_cached(self, num_cached: int) -> None:
        """Note how many tokens of the prompt didn't have to be read, unless the text was only interrupted."""
        if len(self.text) > len(self.text.prompt):
            return
        self.text.num_cached = min(num_cached, len(self.text.prompt) - 1)
        self.channel.push(num_cached)

    def accept(self, token: int) -> None:
        """Append a token that was drawn. The reader gets its chunk; an error ends this text alone."""
        try:
            self.text.sampler.accept(token)
            self.push(token)
        except MlxlmError as error:
            self.fail(error)

    def push(self, token: int) -> None:
        """Append a token that `sampler` drew and accepted."""
        chunk = self.text.push(token)
        self.finished = chunk.finish_reason is not None
        self.channel.push(chunk)
        if self.finished:
            self.channel.end(self.text.result())

    def fail(self, error: BaseException) -> None:
        """End the text with an error."""
        self.finished = True
        self.channel.end(error=error)


@dataclass
class _Draw:
    """A token for every row, which may not have been computed yet.

    Attributes:
        tokens: int32 `[B]`.
        certain: Whether rounding can't change them, bool `[B]`; None if a row was computed alone, or without a margin.
        snapshots: The state of each row's sampler before the draw.
    """

    tokens: mx.array
    certain: mx.array | None
    snapshots: list[SamplerSnapshot | None]

    def append(self, other: _Draw) -> None:
        if self.certain is not None or other.certain is not None:
            self.certain = mx.concatenate([self._all_certain(), other._all_certain()])
        self.tokens = mx.concatenate([self.tokens, other.tokens])
        self.snapshots = [*self.snapshots, *other.snapshots]

    def replace(self, rows: Sequence[int], other: _Draw) -> None:
        index = mx.array(rows)
        if self.certain is not None or other.certain is not None:
            self.certain = mx.put_along_axis(self._all_certain(), index, other._all_certain(), axis=0)
        self.tokens = mx.put_along_axis(self.tokens, index, other.tokens, axis=0)
        for row, snapshot in zip(rows, other.snapshots, strict=True):
            self.snapshots[row] = snapshot

    def _all_certain(self) -> mx.array:
        return mx.ones(len(self.snapshots), mx.bool_) if self.certain is None else self.certain

    def select(self, rows: Sequence[int]) -> None:
        index = mx.array(rows)
        self.tokens = self.tokens[index]
        self.certain = None if self.certain is None else self.certain[index]
        self.snapshots = [self.snapshots[row] for row in rows]


class RunningBatch:
    """Texts that are decoded together, with their caches stacked.

    As in `generate_tokens`, step t+1 is dispatched before the tokens of step t are read. A finished row keeps
    computing, and its tokens are dropped, until `remove_finished` removes it, which copies the caches of all others.

    Logits of several rows differ in their last bits from those of one row. With a margin, where that could change the
    drawn token, a step of that row alone decides: so a text is the one that its request gives alone.
    """

    def __init__(self, step: DecodeStep, context_length: int, margin: float | None):
        """Start without rows.

        Args:
            step: The model's decoding step.
            context_length: The number of positions of the model.
            margin: As for `sample_with_certainty`.
        """
        self._step, self._context_length, self._margin = step, context_length, margin
        self.rows: list[Row] = []
        self._caches: list[Any] = []
        self._drawn = _Draw(mx.zeros(0, mx.int32), None, [])
        self.num_steps = 0

    @property
    def active_rows(self) -> list[Row]:
        """The unfinished rows."""
        return [row for row in self.rows if not row.finished]

    @property
    def idle_steps(self) -> int:
        """Steps of finished rows since they finished, all rows together."""
        return sum(row.idle_steps for row in self.rows if row.finished)

    @property
    def length(self) -> int:
        """Tokens of the longest unfinished text."""
        return max((len(row.text) for row in self.active_rows), default=0)

    @property
    def nbytes(self) -> int:
        """Bytes of the caches."""
        return sum(cache.nbytes for cache in self._caches)

    def join(self, rows: Sequence[Row], caches: list[Any]) -> None:
        """Add rows, with stacked caches that hold all of their tokens but the last."""
        tokens = mx.array([row.text.last_token for row in rows], mx.int32)
        for row in rows:
            row.is_read = True
        self._append(rows, caches, _Draw(tokens, None, [None] * len(rows)))

    def merge(self, other: RunningBatch) -> None:
        """Add the rows of another batch, which must not be used afterwards.

        If possible they take the places of finished rows, since otherwise the caches of all rows are copied.
        """
        if not self.has_places_for(other):
            self.remove_finished()
            other.remove_finished()
            self._append(other.rows, other._caches, other._drawn)
            return
        places = self._places(len(other.rows))
        for mine, theirs in zip(self._caches, other._caches, strict=True):
            mine.replace_rows(places, theirs)
        self._drawn.replace(places, other._drawn)
        for place, row in zip(places, other.rows, strict=True):
            self.rows[place] = row

    def has_places_for(self, other: RunningBatch) -> bool:
        """Whether there are enough finished rows that the rows of `other` can replace."""
        return len(self._places(len(other.rows))) == len(other.rows) and all(
            isinstance(mine, KVCache) and mine.can_replace_rows(theirs)
            for mine, theirs in zip(self._caches, other._caches, strict=True)
        )

    def _places(self, count: int) -> list[int]:
        return [i for i, row in enumerate(self.rows) if row.finished][:count]

    def _append(self, rows: Sequence[Row], caches: list[Any], drawn: _Draw) -> None:
        if self.rows:
            caches = [type(old).merge([old, new]) for old, new in zip(self._caches, caches, strict=True)]
            self._drawn.append(drawn)
        else:
            self._drawn = drawn
        self.rows, self._caches = [*self.rows, *rows], caches

    def remove_finished(self) -> None:
        """Remove the finished rows."""
        self._keep([i for i, row in enumerate(self.rows) if not row.finished])

    def take_out(self, row: Row) -> Row:
        """Remove a row that will join again. A token that was drawn and not read yet will be drawn again."""
        index = self.rows.index(row)
        if (before := self._drawn.snapshots[index]) is not None:
            row.text.sampler.restore(before)
        self._keep([i for i in range(len(self.rows)) if i != index])
        return row

    def row_caches(self, row: Row) -> tuple[list[int], list[Any]]:
        """What the caches hold of a row: its tokens, and one-row caches that share arrays with those of the batch."""
        index, ids = self.rows.index(row), row.text.ids
        caches = [cache.row(index) if len(self.rows) > 1 else cache.copy() for cache in self._caches]
        if caches:
            surplus = caches[0].offset - len(ids)
            if surplus > 0 and all(cache.can_trim(surplus) for cache in caches):
                for cache in caches:
                    cache.trim(surplus)
            elif surplus > 0:
                return [], []
            ids = ids[: len(ids) + min(surplus, 0)]
        return ids, caches

    def step(self, on_finish: Callable[[Row], None] = lambda row: None) -> int:
        """Dispatch one more token for every row, and read the tokens of the step before.

        Args:
            on_finish: Called with each row that finishes, before its caches change.

        Returns:
            How many tokens of texts were read.
        """
        if any(row.finished and len(row.text) + row.idle_steps >= self._context_length for row in self.rows):
            self.remove_finished()  # the model has no positions beyond its context
        continues = any(not row.finished and (row.is_read or row.text.remaining > 1) for row in self.rows)
        needs_last_token = any(row.text.sampler.needs_last_token for row in self.rows if not row.finished)
        drawn, logits = self._drawn, None
        if continues:
            logits = self._step(self._drawn.tokens[:, None], self._caches)
            if needs_last_token:
                async_eval(logits)
            else:
                self._drawn = self._draw(logits)
        num_read, alone = self._read(drawn, fed=continues, on_finish=on_finish)
        if alone:
            keep = [i for i, row in enumerate(self.rows) if row not in alone]
            logits = None if logits is None else logits[mx.array(keep)] if keep else None
            self._keep(keep)
        if needs_last_token and logits is not None:
            self._drawn = self._draw(logits)
        for row, caches in alone.items():
            if not row.finished:
                self.join([row], caches)
        self.num_steps += 1
        clear_memory_cache_at(self.num_steps)
        return num_read

    def _keep(self, rows: list[int]) -> None:
        if len(rows) == len(self.rows):
            return
        self.rows = [self.rows[i] for i in rows]
        if not rows:
            self._caches = []  # frees memory for the next prompts
            self._drawn = _Draw(mx.zeros(0, mx.int32), None, [])
            return
        for cache in self._caches:
            cache.select(rows)
        self._drawn.select(rows)

    def _read(self, drawn: _Draw, fed: bool, on_finish: Callable[[Row], None]) -> tuple[int, dict[Row, list[Any]]]:
        """Append the tokens of `drawn` to their texts.

        Args:
            drawn: The tokens of the last step.
            fed: Whether a step after it was dispatched.
            on_finish: As for `step`.

        Returns:
            How many tokens were read, and rows whose token was decided alone and is another one, with the caches of
            their own that hold all tokens but it.
        """
        num_read, alone = 0, {}
        certain = None if drawn.certain is None else drawn.certain.tolist()
        for i, (row, token) in enumerate(zip(self.rows, drawn.tokens.tolist(), strict=True)):
            if row.finished:
                row.idle_steps += 1
                continue
            if row.is_read:
                row.is_read = False
                continue
            if certain is not None and not certain[i] and drawn.snapshots[i] is not None:
                token, caches = self._decide_alone(i, token, drawn.snapshots[i], fed)
                if caches:
                    alone[row] = caches
            row.accept(token)
            num_read += 1
            if row.finished:
                on_finish(row)
        return num_read, alone

    def _decide_alone(self, index: int, token: int, before: Any, fed: bool) -> tuple[int, list[Any]]:
        """Draw `token` of a row again, from a step of that row alone.

        Returns:
            The token; if it is another one, caches that hold everything before it.
        """
        row, surplus = self.rows[index], 2 if fed else 1
        caches = [cache.row(index) for cache in self._caches]
        if not all(cache.can_trim(surplus) for cache in caches):
            return token, []
        for cache in caches:
            cache.trim(surplus)
        logits = self._step(mx.array([[row.text.last_token]], mx.int32), caches)
        sampler = row.text.sampler
        trial = sampler.fork()
        trial.restore(before)
        if trial(logits).item() == token:
            return token, []
        sampler.restore(before)
        return sampler(logits).item(), caches

    def _draw(self, logits: mx.array) -> _Draw:
        """The next token of each row, 0 for a finished row, from logits `[B, V]`; being computed."""
        active = [i for i, row in enumerate(self.rows) if not row.finished]
        snapshots: list[SamplerSnapshot | None] = [None] * len(self.rows)
        if not active:
            return _Draw(mx.zeros(len(self.rows), mx.int32), None, snapshots)
        samplers = [self.rows[i].text.sampler for i in active]
        for i, sampler in zip(active, samplers, strict=True):
            snapshots[i] = sampler.snapshot()
        everyone = len(active) == len(self.rows)
        indices = mx.array(active)
        margin = self._margin if len(self.rows) > 1 else None
        tokens, certain = sample_with_certainty(samplers, logits if everyone else logits[indices], margin)
        if not everyone:
            tokens = mx.put_along_axis(mx.zeros(len(self.rows), mx.int32), indices, tokens, axis=0)
            if certain is not None:
                certain = mx.put_along_axis(mx.ones(len(self.rows), mx.bool_), indices, certain, axis=0)
        async_eval(tokens if certain is None else (tokens, certain))
        return _Draw(tokens, certain, snapshots)
