"""Batches of token rows: shuffled epochs without end for training, one exact pass for validation; reading ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np

from mlxlm.data.dataset import TokenDataset
from mlxlm.data.options import PACKINGS
from mlxlm.data.packing import BestFitPacking, ConcatenatePacking, Packing, Span
from mlxlm.utils.errors import DataError

BLOCK_ROWS = 1000


class Mixture:
    """Maps each row to a source, as a function of the weights and the seed alone.

    Every block of 1000 rows has the same number of rows of each source, as close to its weight as a thousandth and at
    least one, in an order drawn by the seed. So the shares don't drift from the weights, as they would if each row were
    drawn independently, and how many rows of a source precede any row is known without counting.

    Raises:
        DataError: There are more sources than rows in a block.
    """

    def __init__(self, weights: Sequence[float], seed: int):
        if len(weights) > BLOCK_ROWS:
            raise DataError(f"{len(weights)} sources with weights are too many", f"at most {BLOCK_ROWS}")
        self.counts = _rows_per_block(np.asarray(weights, np.float64))
        self._seed = seed
        self._block = lru_cache(maxsize=2)(self._draw_block)  # two: a batch can span two blocks

    def locate(self, row: int) -> tuple[int, int]:
        """The source of a row, and the row's number among the rows of that source."""
        block, i = divmod(row, BLOCK_ROWS)
        sources, numbers = self._block(block)
        source = int(sources[i])
        return source, block * int(self.counts[source]) + int(numbers[i])

    def rows_before(self, row: int) -> np.ndarray:
        """How many rows of each source precede a row."""
        block, i = divmod(row, BLOCK_ROWS)
        return block * self.counts + np.bincount(self._block(block)[0][:i], minlength=len(self.counts))

    def _draw_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """The source of each row of a block, and how many rows of that source precede it in the block."""
        sources = np.repeat(np.arange(len(self.counts)), self.counts)
        if len(self.counts) > 1:
            sources = np.random.default_rng([self._seed, block]).permutation(sources)
        numbers = np.empty(BLOCK_ROWS, np.int64)
        for source, count in enumerate(self.counts):
            numbers[sources == source] = np.arange(count)
        return sources, numbers


def _rows_per_block(weights: np.ndarray) -> np.ndarray:
    """Rows of each source in a block: one each, the others by the largest remainder method (Hamilton)."""
    quota = np.maximum(0, BLOCK_ROWS * weights / weights.sum() - 1)
    quota *= (BLOCK_ROWS - len(weights)) / max(quota.sum(), 1e-300)
    counts = np.floor(quota).astype(np.int64)
    missing = BLOCK_ROWS - len(weights) - int(counts.sum())
    counts[np.argsort(counts - quota, kind="stable")[:missing]] += 1
    return counts + 1


_PACKINGS: dict[str, Callable[..., Packing]] = dict(zip(PACKINGS, (ConcatenatePacking, BestFitPacking), strict=True))
_NO_TARGETS_HINT = "a longer sequence length, or conversations with messages of the assistant"


class Batch(NamedTuple):
    """The input of one forward pass in training.

    Attributes:
        tokens: int32 `[B, T + 1]`: inputs are [:, :-1], targets [:, 1:].
        segment_ids: int32 `[B, T]`: the document of each input, increasing along a row; attention stays within a
            document. None: each row is one text.
        loss_weights: float32 `[B, T]`: the weight of each target in the loss, 0 for none. None: all are 1.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray | None = None
    loss_weights: np.ndarray | None = None


class TrainBatches:
    """Batches of rows of `max_seq_length` + 1 tokens, epoch after epoch, without end.

    Batch `index` is a pure function of the arguments and `index`, so a resumed run needs no state but its step. A part
    of the data with a weight of its own gives its share of the tokens (see `Mixture`), and has its own epochs. With
    several processes, batch i of rank r is batch i · num_processes + r of a single process.

    Args:
        data: Training tokens.
        batch_size: Rows per batch.
        max_seq_length: Targets per row.
        seed: Determines the order.
        packing: "concatenate" (windows of the concatenated text) or "best-fit" (rows of whole documents, padded at the
            end with token 0 of weight 0, see `BestFitPacking`).
        document_mask: Give batches segment ids, so that attention stays within a document.
        mask_prompt: Only the assistant's messages are targets, see `TokenDataset.loss_mask`.
        rank: Of this process.
        num_processes: Processes that train together.
        batches_per_step: Of each process.

    Attributes:
        rows: Rows per epoch of all parts.
        dropped_fraction: Share of the drawn text that an epoch leaves out, because it doesn't fill a row.
        padding: Share of the rows that is padding.

    Raises:
        DataError: The data, or a part of it, doesn't fill one row.
    """

    def __init__(
        self,
        data: TokenDataset,
        batch_size: int,
        max_seq_length: int,
        seed: int,
        *,
        packing: str = "concatenate",
        document_mask: bool = False,
        mask_prompt: bool = False,
        rank: int = 0,
        num_processes: int = 1,
        batches_per_step: int = 1,
    ):
        self._batch_size, self._max_seq_length = batch_size, max_seq_length
        self._document_mask, self._mask_prompt = document_mask, mask_prompt
        self._has_loss_weights = mask_prompt or packing == "best-fit"
        self._rank, self._num_processes, self._per_step = rank, num_processes, batches_per_step
        self._parts = data.parts
        pack = _PACKINGS[packing]
        self._packings = [pack(part.data, max_seq_length + 1, seed, source) for source, part in enumerate(self._parts)]
        # A part whose rows have more padding takes more rows for the same share of the tokens.
        weights = [part.weight / (1 - p.padding) for part, p in zip(self._parts, self._packings, strict=True)]
        self._mixture = Mixture(weights, seed)
        self.rows = sum(p.rows for p in self._packings)
        shares = self._mixture.counts / self._mixture.counts.sum()
        self.dropped_fraction = float(np.dot(shares, [p.dropped_fraction for p in self._packings]))
        self.padding = float(np.dot(shares, [p.padding for p in self._packings]))

    def batch(self, index: int) -> Batch:
        """Batch number `index`, of `batch_size` rows. Raises DataError if it has no targets."""
        shape = self._batch_size, self._max_seq_length
        batch = _padding_batch(shape, segment_ids=self._document_mask, loss_weights=self._has_loss_weights)
        first = (index * self._num_processes + self._rank) * self._batch_size
        for i in range(self._batch_size):
            source, row = self._mixture.locate(first + i)
            _fill_row(batch, i, self._parts[source].data, self._packings[source].spans(row), self._mask_prompt)
        if batch.loss_weights is not None and not batch.loss_weights.any():
            raise DataError(f"batch {index} of {self._parts[0].data.name} has no training targets", _NO_TARGETS_HINT)
        return batch

    def read_step(self, step: int) -> list[Batch]:
        """The batches of step number `step`, from 1."""
        first = (step - 1) * self._per_step
        return [self.batch(first + i) for i in range(self._per_step)]

    def epochs(self, step: int) -> dict[str, float]:
        """Epochs of each part that all processes have seen after step `step`."""
        rows = self._mixture.rows_before(step * self._rows_per_step)
        return {part.name: int(n) / p.rows for part, p, n in zip(self._parts, self._packings, rows, strict=True)}

    def epoch_at(self, step: int) -> float:
        """Epochs of all parts together, by the rows they have, after step `step`."""
        return step * self._rows_per_step / self.rows

    @property
    def _rows_per_step(self) -> int:
        return self._per_step * self._num_processes * self._batch_size


def validation_batches(
    data: TokenDataset,
    batch_size: int,
    max_seq_length: int,
    max_tokens: int | None = None,
    *,
    document_mask: bool = False,
    mask_prompt: bool = False,
) -> Iterator[Batch]:
    """One pass in order, in batches of one shape, padded with token 0 of weight 0.

    Args:
        data: Tokens.
        batch_size: Rows per batch.
        max_seq_length: Targets per row.
        max_tokens: Only as many rows as have this many targets (at least one row), spread evenly over the data.
        document_mask: See `TrainBatches`.
        mask_prompt: False: rows are windows, and every token after the first is a target exactly once. True: rows are
            conversations, as many as fit whole, each from its start and cropped to a row; the assistant's messages are
            the targets, and conversations without targets are left out.

    Raises:
        DataError: The data has fewer than two tokens, or no targets within a row.
    """
    if len(data) < 2:
        raise DataError(
            f"{data.name} has {len(data)} tokens, too few to predict any", "more text, or a larger validation fraction"
        )
    conversations = _conversation_rows(data, max_seq_length) if mask_prompt else []
    rows = len(conversations) if mask_prompt else -(-(len(data) - 1) // max_seq_length)
    if not rows:
        raise DataError(f"{data.name} has no answers that begin in rows of {max_seq_length} tokens", _NO_TARGETS_HINT)
    count = rows if max_tokens is None else max(1, min(rows, max_tokens // max_seq_length))
    numbers = [i * rows // count for i in range(count)]
    if mask_prompt:
        chosen = [conversations[row] for row in numbers]
    else:
        starts = [row * max_seq_length for row in numbers]
        chosen = [[Span(start, min(start + max_seq_length + 1, len(data)))] for start in starts]

    def batches() -> Iterator[Batch]:
        for first in range(0, len(chosen), batch_size):
            batch = _padding_batch((batch_size, max_seq_length), segment_ids=document_mask, loss_weights=True)
            for row, spans in enumerate(chosen[first : first + batch_size]):
                _fill_row(batch, row, data, spans, mask_prompt)
            yield batch

    return batches()


def _conversation_rows(data: TokenDataset, length: int) -> list[list[Span]]:
    """Rows of at most `length` + 1 tokens: documents in order, longer ones cropped, those without targets left out."""
    rows: list[list[Span]] = []
    room = 0
    starts, stops = data.starts.bounds(np.arange(len(data.starts)))
    for start, stop in zip(starts.tolist(), np.minimum(stops, starts + length + 1).tolist(), strict=True):
        if not data.loss_mask(start, stop)[1:].any():
            continue
        if stop - start > room:
            rows.append([])
            room = length + 1
        rows[-1].append(Span(start, stop))
        room -= stop - start
    return rows


def _padding_batch(shape: tuple[int, int], *, segment_ids: bool, loss_weights: bool) -> Batch:
    """A batch of `shape` (B, T) of nothing but padding."""
    return Batch(
        np.zeros((shape[0], shape[1] + 1), np.int32),
        np.zeros(shape, np.int32) if segment_ids else None,
        np.zeros(shape, np.float32) if loss_weights else None,
    )


def _fill_row(batch: Batch, row: int, data: TokenDataset, spans: list[Span], mask_prompt: bool) -> None:
    """Write the tokens of `spans` into a row of padding."""
    ranges = [(span.start, span.stop) for span in spans]
    n = sum(stop - start for start, stop in ranges)
    batch.tokens[row, :n] = np.concatenate([data.slice(*span) for span in ranges])
    if batch.loss_weights is not None:
        masks = [np.array(data.loss_mask(*s)) if mask_prompt else np.ones(s[1] - s[0], np.uint8) for s in ranges]
        for span, mask in zip(spans, masks, strict=True):
            if span.continues:
                mask[0] = 0
        batch.loss_weights[row, : n - 1] = np.concatenate(masks)[1:]
    if batch.segment_ids is not None:
        segment_ids = _consecutive_ids([data.segment_ids(*span) for span in ranges])
        batch.segment_ids[row] = segment_ids[-1] + 1  # padding has an id of its own
        batch.segment_ids[row, :n] = segment_ids[: batch.segment_ids.shape[1]]


def _consecutive_ids(segment_ids: list[np.ndarray]) -> np.ndarray:
    """Number the documents of several spans along a row; each span starts a new document."""
    numbered, first = [], 0
    for ids in segment_ids:
        numbered.append(ids + first)
        first = numbered[-1][-1] + 1
    return np.concatenate(numbered)


T = TypeVar("T")


def prefetch(read: Callable[[int], T], numbers: Iterable[int], prefetch_factor: int = 2) -> Generator[T, None, None]:
    """Yield `read(n)` for each of `numbers`, in order, computing up to `prefetch_factor` results ahead.

    `read` runs in one thread, one call at a time. An exception in it is raised where its result would have come, and
    ends the iteration; an exception in `numbers` can come up to `prefetch_factor` results early. Close the iterator if
    you may leave it early: then its thread has ended.
    """
    rest = iter(numbers)
    pending: deque[Future[T]] = deque()
    with ThreadPoolExecutor(1, "prefetch") as pool:
        try:
            pending.extend(pool.submit(read, n) for n in islice(rest, prefetch_factor))
            while pending:
                result = pending.popleft().result()
                pending.extend(pool.submit(read, n) for n in islice(rest, 1))
                yield result
        finally:
            for future in pending:
                future.cancel()
