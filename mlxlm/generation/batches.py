"""Running texts in several batches, each of texts of similar length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

from mlxlm.backend.error_text import raise_if_results_lost
from mlxlm.generation.kv_memory import KVMemory
from mlxlm.generation.running_batch import Row, RunningBatch

# Bytes that a step could read in the time that its operations take to start, whatever the model's size.
_OVERHEAD_BYTES = 32 << 20
# Copying caches to new memory takes as long as reading this many times as many bytes. Measured on a CPU.
_COPY_COST = 8


class Batches:
    """Batches that are decoded in turn, one token of each text per step.

    A batch pads its rows to the longest one, which takes memory, and time in each step. A second batch reads the
    weights once more. So two batches are merged if this adds fewer bytes of padding than the weights have: at once if
    the rows of one fit into the places of finished rows of the other, else as soon as keeping them apart has taken as
    long as copying both. Finished rows are removed when they have taken as long as copying the others.

    Args:
        new_batch: Makes an empty batch.
        memory: Computes the bytes of keys and values.
    """

    def __init__(self, new_batch: Callable[[], RunningBatch], memory: KVMemory):
        self._new_batch, self._memory = new_batch, memory
        self._batches: list[RunningBatch] = []

    @property
    def rows(self) -> list[Row]:
        """The unfinished rows, in the order of their requests."""
        return sorted((row for batch in self._batches for row in batch.active_rows), key=lambda row: row.number)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(batch.nbytes for batch in self._batches)

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the rows need, with padding, finished rows and the next tokens."""
        return sum(self._memory.reserved_bytes(batch.length, len(batch.rows)) for batch in self._batches)

    def join(self, rows: Sequence[Row], caches: list[Any]) -> None:
        """Add rows, with stacked caches that hold all of their tokens but the last."""
        batch = self._new_batch()
        batch.join(rows, caches)
        self._batches.append(batch)

    def remove_finished(self) -> None:
        """Free the memory of finished rows."""
        for batch in self._batches:
            batch.remove_finished()
        self._remove_inactive()

    def take_out(self, row: Row) -> Row:
        """Remove a row that will join again. A token that was drawn and not read yet will be drawn again."""
        self._batch_of(row).take_out(row)
        self._remove_inactive()
        return row

    def row_caches(self, row: Row) -> tuple[list[int], list[Any]]:
        """What the caches hold of a row: its tokens, and one-row caches that share arrays with those of its batch."""
        return self._batch_of(row).row_caches(row)

    def step(self, on_finish: Callable[[Row], None], max_padding: int) -> int:
        """Merge batches, and decode one token of every row. An error ends the rows of its batch.

        Args:
            on_finish: Called with each row that finishes, before its caches change.
            max_padding: Bytes that are left for padding.

        Returns:
            How many tokens were read.
        """
        self._merge(max_padding)
        num_read = 0
        for batch in self._batches:
            if batch.idle_steps >= _COPY_COST * len(batch.active_rows):
                batch.remove_finished()
            try:
                num_read += batch.step(on_finish) if batch.rows else 0
            except Exception as error:
                raise_if_results_lost(error)
                for row in batch.active_rows:
                    row.fail(error)
        self._remove_inactive()
        return num_read

    def _batch_of(self, row: Row) -> RunningBatch:
        return next(batch for batch in self._batches if row in batch.rows)

    def _remove_inactive(self) -> None:
        self._batches = [batch for batch in self._batches if batch.active_rows]

    def _merge(self, max_padding: int) -> None:
        """Merge batches while that is worth its time, with at most `max_padding` bytes of padding."""
        self._remove_inactive()
        while pair := self._next_pair(max_padding):
            one, other = pair
            max_padding -= self._padding(one, other)
            one.merge(other)
            self._batches.remove(other)

    def _next_pair(self, max_padding: int) -> tuple[RunningBatch, RunningBatch] | None:
        step_bytes = self._memory.weight_bytes + _OVERHEAD_BYTES  # that a batch of its own reads in addition

        def is_worth_it(one: RunningBatch, other: RunningBatch) -> bool:
            if self._padding(one, other) > min(step_bytes, max_padding):
                return False
            bytes_so_far = min(one.num_steps, other.num_steps) * step_bytes
            return one.has_places_for(other) or bytes_so_far >= _COPY_COST * (one.nbytes + other.nbytes)

        pairs = [pair for pair in permutations(self._batches, 2) if is_worth_it(*pair)]
        return min(pairs, key=lambda pair: self._padding(*pair), default=None)

    def _padding(self, one: RunningBatch, other: RunningBatch) -> int:
        """Bytes that merging two batches would add."""
        sizes = [(batch.length, len(batch.active_rows)) for batch in (one, other)]
        merged = self._memory.bytes_for(max(one.length, other.length), sum(count for _, count in sizes))
        return merged - sum(self._memory.bytes_for(*size) for size in sizes)
