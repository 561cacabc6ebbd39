"""The batches of running texts: which are decoded together, and when two become one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

from mlxlm.generation.decode_step import DecodeStep
from mlxlm.generation.decoding import Batch
from mlxlm.generation.kv_memory import KVMemory
from mlxlm.generation.speculative import Drafting
from mlxlm.generation.text import Text

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

    Texts that can't share a batch have one of their own, which is never merged and doesn't step while its text pauses.

    Args:
        step: The model's decoding step.
        context_length: The number of positions of the model.
        margin: As for `sample_with_certainty`.
        memory: Computes the bytes of keys and values.
    """

    def __init__(self, step: DecodeStep, context_length: int, margin: float | None, memory: KVMemory):
        self._arguments, self._memory = (step, context_length, margin), memory
        self._shared: list[Batch[Text]] = []
        self._single: list[Batch[Text]] = []

    @property
    def rows(self) -> list[Text]:
        """The unfinished texts, in the order of their requests."""
        return sorted((row for batch in self._all for row in batch.active_rows), key=lambda row: row.number)

    @property
    def has_shared(self) -> bool:
        """Whether there are texts that others can join."""
        return bool(self._shared)

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(batch.nbytes for batch in self._all)

    @property
    def reserved_bytes(self) -> int:
        """Bytes that the rows need, with padding, finished rows and the next tokens."""
        return sum(self._memory.reserved_bytes(batch.num_held, len(batch.rows), batch.capacity) for batch in self._all)

    def join(
        self, rows: Sequence[Text], caches: list[Any], *, single: bool = False, drafting: Drafting | None = None
    ) -> None:
        """Add texts, with stacked caches that hold all of their tokens but the last; or one that is decoded by itself.

        Args:
            rows: The texts.
            caches: Their caches.
            single: Whether the only text is decoded by itself.
            drafting: Its drafts.
        """
        batches = self._single if single else self._shared
        batches.append(Batch(*self._arguments, drafting))
        batches[-1].join(rows, caches)

    def remove_finished(self) -> None:
        """Free the memory of finished rows."""
        for batch in self._all:
            batch.remove_finished()
        self.remove_inactive()

    def take_out(self, row: Text) -> tuple[list[int], list[Any]]:
        """Remove a text. Returns its tokens, and caches that hold them; see `Batch.take_out`."""
        batch = self.batch_of(row)
        taken = batch.take_out(row)
        if not batch.rows:  # else others may have ended in the same step
            self.remove_inactive()
        return taken

    def batch_of(self, row: Text) -> Batch[Text]:
        """The batch that a text is in."""
        return next(batch for batch in self._all if row in batch.rows)

    def is_single(self, row: Text) -> bool:
        """Whether a text has a batch of its own."""
        return self.batch_of(row) in self._single

    def step(self, on_finish: Callable[[Text], None], max_padding: int) -> int:
        """Merge batches, and decode the next token of every text. An error ends the texts of its batch.

        Args:
            on_finish: Called with each text that has finished, before its caches change.
            max_padding: Bytes that are left for padding.

        Returns:
            How many tokens were read.
        """
        self._merge(max_padding)
        num_read = 0
        for batch in self._all:
            if batch.idle_steps >= _COPY_COST * len(batch.active_rows):
                batch.remove_finished()
            if all(row.paused for row in batch.rows):
                continue
            try:
                num_read += batch.step()
            except Exception as error:
                self._arguments[0].raise_if_fatal(error)
                for row in batch.active_rows:
                    row.fail(error)
                continue
            for row in [row for row in batch.rows if row.finished and not row.idle_steps]:
                on_finish(row)
        self.remove_inactive()
        return num_read

    @property
    def _all(self) -> list[Batch[Text]]:
        return [*self._shared, *self._single]

    def remove_inactive(self) -> None:
        """Remove the batches whose texts have all ended or are elsewhere."""
        for batch in self._all:
            if not batch.active_rows:
                batch.close()
        self._shared = [batch for batch in self._shared if batch.active_rows]
        self._single = [batch for batch in self._single if batch.active_rows]

    def _merge(self, max_padding: int) -> None:
        """Merge batches while that is worth its time, with at most `max_padding` bytes of padding."""
        self.remove_inactive()
        while pair := self._next_pair(max_padding):
            one, other = pair
            max_padding -= self._padding(one, other)
            one.merge(other)
            self._shared.remove(other)

    def _next_pair(self, max_padding: int) -> tuple[Batch[Text], Batch[Text]] | None:
        step_bytes = self._memory.weight_bytes + _OVERHEAD_BYTES  # that a batch of its own reads in addition

        def is_worth_it(one: Batch[Text], other: Batch[Text]) -> bool:
            if self._padding(one, other) > min(step_bytes, max_padding):
                return False
            bytes_so_far = min(one.num_steps, other.num_steps) * step_bytes
            return one.has_places_for(other) or bytes_so_far >= _COPY_COST * (one.nbytes + other.nbytes)

        pairs = [pair for pair in permutations(self._shared, 2) if is_worth_it(*pair)]
        return min(pairs, key=lambda pair: self._padding(*pair), default=None)

    def _padding(self, one: Batch[Text], other: Batch[Text]) -> int:
        """Bytes that merging two batches would add."""
        sizes = [(batch.length, len(batch.active_rows)) for batch in (one, other)]
        merged = self._memory.bytes_for(max(one.length, other.length), sum(count for _, count in sizes))
        return merged - sum(self._memory.bytes_for(*size) for size in sizes)
