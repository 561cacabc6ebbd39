"""The rows of a batch: texts that grow side by side, a token each per step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mlxlm.backend.mlx import mx
from mlxlm.generation.context import async_eval, clear_memory_cache
from mlxlm.generation.decoding import CLEAR_CACHE_INTERVAL
from mlxlm.generation.sampling import sample_batch
from mlxlm.generation.sequence import TokenSequence
from mlxlm.utils.errors import MlxlmError


@dataclass
class BatchRow:
    """`in_prompt`: its next token to be read is the last one of its prompt, not one of its text. `idle_steps`: steps since
    it ended. `error`: why it ended, if not as a text does."""

    index: int
    text: TokenSequence
    in_prompt: bool = True
    finished: bool = False
    idle_steps: int = 0
    error: MlxlmError | None = None


class RunningBatch:
    """Texts in work, with their caches side by side.

    As in `generate_tokens`, step t+1 is dispatched before the tokens of step t are read. A row that has ended stays,
    and what it computes is thrown away, until `remove_finished` takes it out: that copies the caches of all the others.
    """

    def __init__(self, model, context_size: int):
        self._model, self._size = model, context_size
        self._rows: list[BatchRow] = []
        self._caches: list = []
        self._tokens: mx.array | None = None  # [B]: drawn, and not read yet
        self._steps = 0

    @property
    def num_active(self) -> int:
        """Rows that haven't ended."""
        return sum(not row.finished for row in self._rows)

    @property
    def mostly_active(self) -> bool:
        """Whether fewer than a quarter of the rows have ended."""
        return self.num_active * 4 > len(self._rows) * 3

    def join(self, groups: Iterable[tuple[Sequence[BatchRow], list]]) -> None:
        """Add rows, with the caches that hold their prompts, all but the last token of each."""
        for rows, caches in groups:
            last = mx.array([row.text.prompt[-1] for row in rows], mx.int32)
            if self._rows:
                caches = [type(old).merge([old, new]) for old, new in zip(self._caches, caches, strict=True)]
                last = mx.concatenate([self._tokens.astype(mx.int32), last])
            self._rows, self._caches, self._tokens = [*self._rows, *rows], caches, last

    def remove_finished(self) -> None:
        """Take out the rows that have ended."""
        kept = [i for i, row in enumerate(self._rows) if not row.finished]
        if len(kept) == len(self._rows):
            return
        self._rows = [self._rows[i] for i in kept]
        if not kept:
            self._caches, self._tokens = [], None  # memory that the next prompts can have
            return
        for cache in self._caches:
            cache.select(kept)
        self._tokens = self._tokens[mx.array(kept)]

    def step(self) -> tuple[int, list[BatchRow]]:
        """One more token for every row; how many tokens of texts were read meanwhile, those drawn in the step before,
        and the rows that ended with them."""
        if any(row.finished and len(row.text) + row.idle_steps >= self._size for row in self._rows):
            self.remove_finished()  # there are no positions behind the model's context
        going_on = any(not row.finished and (row.in_prompt or row.text.remaining > 1) for row in self._rows)
        waits = any(row.text.sampler.needs_last_token for row in self._rows if not row.finished)
        following = self._tokens
        if going_on:
            logits = self._model(self._tokens[:, None], cache=self._caches)[:, -1]
            following = async_eval(logits if waits else self._drawn(logits))
        read, finished = 0, []
        for row, token in zip(self._rows, self._tokens.tolist(), strict=True):
            if row.finished:
                row.idle_steps += 1
                continue
            if row.in_prompt:
                row.in_prompt = False
                continue
            try:
                row.text.sampler.accept(token)
                row.finished = row.text.push(token).finish_reason is not None
                read += 1
            except MlxlmError as error:  # of this text alone
                row.finished, row.error = True, error
            if row.finished:
                finished.append(row)
        self._tokens = async_eval(self._drawn(logits)) if going_on and waits else following
        self._steps += 1
        if self._steps % CLEAR_CACHE_INTERVAL == 0:
            clear_memory_cache()
        return read, finished

    def _drawn(self, logits: mx.array) -> mx.array:
        """logits `[B, V]` -> the next token of each row `[B]`; anything for a row that has ended."""
        num_active = [i for i, row in enumerate(self._rows) if not row.finished]
        if not num_active:
            return mx.zeros(len(self._rows), mx.int32)
        samplers = [self._rows[i].text.sampler for i in num_active]
        if len(num_active) == len(self._rows):
            return sample_batch(samplers, logits)
        where = mx.array(num_active)
        drawn = sample_batch(samplers, logits[where]).astype(mx.int32)
        return mx.put_along_axis(mx.zeros(len(self._rows), mx.int32), where, drawn, axis=0)
