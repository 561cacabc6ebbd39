"""The rows of a batch: texts that are decoded together, one token each per step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mlxlm.backend.mlx import mx, nn
from mlxlm.generation.device_memory import async_eval, clear_memory_cache_at
from mlxlm.generation.sampling import sample_batch
from mlxlm.generation.sequence import TokenSequence
from mlxlm.utils.errors import MlxlmError


@dataclass
class BatchRow:
    """One text of a batch.

    Attributes:
        index: The number of its request.
        text: The text so far.
        in_prompt: Whether the next token to read is the last one of the prompt, not one of the text.
        finished: Whether the text has ended.
        idle_steps: Steps since then.
        error: Why the text failed, if it did.
    """

    index: int
    text: TokenSequence
    in_prompt: bool = True
    finished: bool = False
    idle_steps: int = 0
    error: MlxlmError | None = None


class RunningBatch:
    """Texts that are decoded together, with their caches stacked.

    As in `generate_tokens`, step t+1 is dispatched before the tokens of step t are read. A finished row keeps
    computing, and its tokens are dropped, until `remove_finished` removes it, which copies the caches of all others.
    """

    def __init__(self, model: nn.Module, context_length: int):
        """Start without rows. `context_length`: the number of positions of the model."""
        self._model, self._context_length = model, context_length
        self._rows: list[BatchRow] = []
        self._caches: list[Any] = []
        self._tokens = mx.zeros(0, mx.int32)  # [B]: drawn, and not read yet
        self._num_steps = 0

    @property
    def num_active(self) -> int:
        """The number of unfinished rows."""
        return sum(not row.finished for row in self._rows)

    @property
    def mostly_active(self) -> bool:
        """Whether fewer than a quarter of the rows have finished."""
        return self.num_active * 4 > len(self._rows) * 3

    def join(self, groups: Iterable[tuple[Sequence[BatchRow], list[Any]]]) -> None:
        """Add rows. Each group comes with caches that hold its prompts except for their last tokens."""
        for rows, caches in groups:
            last_tokens = mx.array([row.text.prompt[-1] for row in rows], mx.int32)
            if self._rows:
                caches = [type(old).merge([old, new]) for old, new in zip(self._caches, caches, strict=True)]
                last_tokens = mx.concatenate([self._tokens.astype(mx.int32), last_tokens])
            self._rows, self._caches, self._tokens = [*self._rows, *rows], caches, last_tokens

    def remove_finished(self) -> None:
        """Remove the finished rows."""
        active = [i for i, row in enumerate(self._rows) if not row.finished]
        if len(active) == len(self._rows):
            return
        self._rows = [self._rows[i] for i in active]
        if not active:
            self._caches = []  # frees memory for the next prompts
            return
        for cache in self._caches:
            cache.select(active)
        self._tokens = self._tokens[mx.array(active)]

    def step(self) -> tuple[int, list[BatchRow]]:
        """Dispatch one more token for every row, and read the tokens of the step before.

        Returns:
            How many tokens of texts were read, and the rows that finished with them.
        """
        if any(row.finished and len(row.text) + row.idle_steps >= self._context_length for row in self._rows):
            self.remove_finished()  # the model has no positions beyond its context
        continues = any(not row.finished and (row.in_prompt or row.text.remaining > 1) for row in self._rows)
        needs_last_token = any(row.text.sampler.needs_last_token for row in self._rows if not row.finished)
        following = self._tokens
        if continues:
            logits = self._model(self._tokens[:, None], cache=self._caches)[:, -1]
            following = async_eval(logits if needs_last_token else self._sample(logits))
        num_read, finished = self._read_tokens()
        self._tokens = async_eval(self._sample(logits)) if continues and needs_last_token else following
        self._num_steps += 1
        clear_memory_cache_at(self._num_steps)
        return num_read, finished

    def _read_tokens(self) -> tuple[int, list[BatchRow]]:
        """Append the tokens of the last step to their texts; see `step`."""
        num_read, finished = 0, []
        for row, token in zip(self._rows, self._tokens.tolist(), strict=True):
            if row.finished:
                row.idle_steps += 1
            elif row.in_prompt:
                row.in_prompt = False
            else:
                try:
                    row.text.sampler.accept(token)
                    row.finished = row.text.push(token).finish_reason is not None
                    num_read += 1
                except MlxlmError as error:  # fails this text alone
                    row.finished, row.error = True, error
                if row.finished:
                    finished.append(row)
        return num_read, finished

    def _sample(self, logits: mx.array) -> mx.array:
        """The next token of each row `[B]`, 0 for a finished row, from logits `[B, V]`."""
        active = [i for i, row in enumerate(self._rows) if not row.finished]
        if not active:
            return mx.zeros(len(self._rows), mx.int32)
        samplers = [self._rows[i].text.sampler for i in active]
        if len(active) == len(self._rows):
            return sample_batch(samplers, logits)
        indices = mx.array(active)
        tokens = sample_batch(samplers, logits[indices]).astype(mx.int32)
        return mx.put_along_axis(mx.zeros(len(self._rows), mx.int32), indices, tokens, axis=0)
