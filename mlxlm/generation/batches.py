"""Running texts in several batches, each of texts of similar length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

from mlxlm.generation.kv_memory import KVMemory
from mlxlm.generation.running_batch import Row, RunningBatch


class Batches:
    """Batches that are decoded in turn, one token of each text per step.

    A batch pads its rows to the longest one, which takes memory, and time in each step. A second batch reads the
    weights once more. So two batches are merged if this adds fewer bytes of padding than the weights have.

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
        """Bytes of keys and values that the rows need, padding and the next tokens included."""
        return sum(self._memory.reserved_bytes(batch.length, len(batch.active_rows)) for batch in self._batches)

    def join(self, rows: Sequence[Row], caches: list[Any], max_padding: int) -> None:
        """Add rows, with stacked caches that hold all of their tokens but the last.

        Args:
            rows: The rows.
            caches: One per layer.
            max_padding: Bytes that are left for padding.
        """
        self._remove_inactive()
        batch = self._new_batch()
        batch.join(rows, caches)
        self._batches.append(batch)
        while len(self._batches) > 1:
            pairs = [(self._padding(*pair), *pair) for pair in combinations(self._batches, 2)]
            padding, one, other = min(pairs, key=lambda pair: pair[0])
            if padding > min(self._memory.weight_bytes, max_padding):
                return
            max_padding -= padding
            one.merge(other)
            self._batches.remove(other)

    def take_out(self, row: Row) -> Row:
        """Remove a row that will join again. A token that was drawn and not read yet will be drawn again."""
        self._batch_of(row).take_out(row)
        self._remove_inactive()
        return row

    def row_caches(self, row: Row) -> tuple[list[int], list[Any]]:
        """What the caches hold of a row: its tokens, and one-row caches that share arrays with those of its batch."""
        return self._batch_of(row).row_caches(row)

    def step(self, on_finish: Callable[[Row], None]) -> int:
        """Decode one token of every row. An error ends the rows of its batch.

        Args:
            on_finish: Called with each row that finishes, before its caches change.

        Returns:
            How many tokens were read.
        """
        num_read = 0
        for batch in self._batches:
            if not batch.mostly_active:
                batch.remove_finished()
            try:
                num_read += batch.step(on_finish) if batch.rows else 0
            except Exception as error:
                for row in batch.active_rows:
                    row.fail(error)
        self._remove_inactive()
        return num_read

    def _batch_of(self, row: Row) -> RunningBatch:
        return next(batch for batch in self._batches if row in batch.rows)

    def _remove_inactive(self) -> None:
        self._batches = [batch for batch in self._batches if batch.active_rows]

    def _padding(self, one: RunningBatch, other: RunningBatch) -> int:
        """Bytes that merging two batches would add."""
        sizes = [(batch.length, len(batch.active_rows)) for batch in (one, other)]
        merged = self._memory.bytes_for(max(one.length, other.length), sum(count for _, count in sizes))
        return merged - sum(self._memory.bytes_for(*size) for size in sizes)
