"""Batches of token windows: an endless shuffled order for training, one exact pass for validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mlxlm.data.dataset import TokenDataset
from mlxlm.data.mixture import Mixture
from mlxlm.data.packing import BestFitPacking, ConcatenatePacking, Packing, Span
from mlxlm.utils.errors import DataError

PACKINGS = {"concatenate": ConcatenatePacking, "best-fit": BestFitPacking}


class Batch(NamedTuple):
    """What one forward pass of training is given.

    tokens: int32 [B, T + 1]: inputs are [:, :-1], targets [:, 1:].
    segment_ids: int32 [B, T], the number of the document that each input is of, rising along a row: attention stays
        within a document. None: a row is one text.
    loss_weights: float32 [B, T], what each target counts (0: it isn't learned). None: each counts 1.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray | None = None
    loss_weights: np.ndarray | None = None


class TrainBatches:
    """Batches of rows of `max_seq_length` + 1 tokens, epoch after epoch, without end.

    Batch `index` is a pure function of the arguments and `index`: a resumed run needs no state but its step. A part of
    the data that has a weight of its own gives its share of the tokens (see `Mixture`), and goes through its own
    epochs. With `num_processes`, several take turns at the batches of one: batch i of rank r is batch i · ranks + r of a
    single one.

    packing: "concatenate" (windows of all text in a row) or "best-fit" (rows of whole documents, padded: see
        `BestFitPacking`). Padding is token 0, of no document, weighs 0 and comes last in a row.
    document_mask: batches say which document each token is of.
    mask_prompt: batches weigh what is to be learned of conversations: see `TokenDataset.loss_mask`.

    Attributes:
        rows: how many rows an epoch of all parts has.
        dropped_fraction: the share of the drawn text that an epoch leaves out, because it doesn't fit into rows.
        padding: the share of the rows that is padding.

    Raises DataError if the data, or a part of it, doesn't fill one row.
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
    ):
        self._batch_size, self._length = batch_size, max_seq_length
        self._document_mask, self._answers_only = document_mask, mask_prompt
        self._weighted = mask_prompt or packing == "best-fit"
        self._rank, self._ranks = rank, num_processes
        self._parts = data.parts
        pack = PACKINGS[packing]
        self._packings: list[Packing] = [
            pack(part.data, max_seq_length + 1, seed, source) for source, part in enumerate(self._parts)
        ]
        # A part whose rows have more padding takes more rows for the same share of the tokens.
        weights = [part.weight / (1 - p.padding) for part, p in zip(self._parts, self._packings, strict=True)]
        self._mixture = Mixture(weights, seed)
        self.rows = sum(p.rows for p in self._packings)
        shares = self._mixture.counts / self._mixture.counts.sum()
        self.dropped_fraction = float(
            sum(share * p.dropped_fraction for share, p in zip(shares, self._packings, strict=True))
        )
        self.padding = float(sum(share * p.padding for share, p in zip(shares, self._packings, strict=True)))

    def batch(self, index: int) -> Batch:
        """Batch number `index`, of `batch_size` rows. Raises DataError where it has nothing to be learned."""
        shape = self._batch_size, self._length
        batch = _padding(shape, segment_ids=self._document_mask, weights=self._weighted)
        first = (index * self._ranks + self._rank) * self._batch_size
        for i in range(self._batch_size):
            source, row = self._mixture.place(first + i)
            _fill(batch, i, self._parts[source].data, self._packings[source].spans(row), self._answers_only)
        if batch.loss_weights is not None and not batch.loss_weights.any():
            hint = "a longer sequence length, or conversations with messages of the assistant"
            raise DataError(f"batch {index} of {self._parts[0].data.name} has nothing to be learned", hint)
        return batch

    def epochs(self, index: int) -> dict[str, float]:
        """How many epochs of each part have been seen before batch `index`."""
        seen = self._mixture.rows_before(index * self._ranks * self._batch_size)
        return {part.name: int(n) / p.rows for part, p, n in zip(self._parts, self._packings, seen, strict=True)}

    def epoch_at(self, index: int) -> float:
        """How many epochs have been seen before batch `index`: rows of all parts, by the rows that they have."""
        return index * self._ranks * self._batch_size / self.rows


def _padding(shape: tuple[int, int], *, segment_ids: bool, weights: bool) -> Batch:
    """A batch of nothing but padding."""
    return Batch(
        np.zeros((shape[0], shape[1] + 1), np.int32),
        np.zeros(shape, np.int32) if segment_ids else None,
        np.zeros(shape, np.float32) if weights else None,
    )


def _fill(batch: Batch, row: int, data: TokenDataset, spans: list[Span], mask_prompt: bool) -> None:
    """Write what `spans` have into a row of padding."""
    ranges = [(span.start, span.stop) for span in spans]
    n = sum(stop - start for start, stop in ranges)
    batch.tokens[row, :n] = np.concatenate([data.slice(*span) for span in ranges])
    if batch.loss_weights is not None:
        loss_mask = [np.array(data.loss_mask(*s)) if mask_prompt else np.ones(s[1] - s[0], np.uint8) for s in ranges]
        for span, of_span in zip(spans, loss_mask, strict=True):
            if span.continues:
                of_span[0] = 0
        batch.loss_weights[row, : n - 1] = np.concatenate(loss_mask)[1:]
    if batch.segment_ids is not None:
        numbers = _numbered([data.segment_ids(*span) for span in ranges])
        batch.segment_ids[row] = numbers[-1] + 1  # padding is of no document
        batch.segment_ids[row, :n] = numbers[: batch.segment_ids.shape[1]]


def _numbered(segment_ids: list[np.ndarray]) -> np.ndarray:
    """Documents numbered along a row: each span begins another."""
    numbers, first = [], 0
    for of_span in segment_ids:
        numbers.append(of_span + first)
        first = numbers[-1][-1] + 1
    return np.concatenate(numbers)


def validation_batches(
    data: TokenDataset,
    batch_size: int,
    max_seq_length: int,
    max_tokens: int | None = None,
    *,
    document_mask: bool = False,
    mask_prompt: bool = False,
) -> Iterator[Batch]:
    """One pass in order, every batch of the same shape, padded with tokens 0 of weight 0.

    Rows are windows: every target (token 1, 2, ... of the data) has weight 1 exactly once. With `mask_prompt` they
    are conversations, as many in a row as fit whole, each from its start and cropped to a row; what counts is what is
    to be learned, see `TokenDataset.loss_mask`, and those without it are left out. With `max_tokens`, only as many rows
    as hold so many targets (at least one), spread evenly over the data. `document_mask`: see `TrainBatches`.

    Raises DataError if the data has fewer than two tokens, or none in it to be learned within a row.
    """
    if len(data) < 2:
        raise DataError(
            f"{data.name} has {len(data)} tokens, too few to predict any",
            "more text, or a larger validation fraction",
        )
    rows = _whole_documents(data, max_seq_length) if mask_prompt else range(0, len(data) - 1, max_seq_length)
    if not rows:
        problem = f"{data.name} has no answers that begin in rows of {max_seq_length} tokens"
        raise DataError(problem, "a longer sequence length, or conversations with messages of the assistant")
    count = len(rows) if max_tokens is None else max(1, min(len(rows), max_tokens // max_seq_length))
    chosen = [rows[i * len(rows) // count] for i in range(count)]
    if not mask_prompt:
        chosen = [[Span(start, min(start + max_seq_length + 1, len(data)))] for start in chosen]
    return _padded(data, chosen, (batch_size, max_seq_length), document_mask, mask_prompt)


def _padded(
    data: TokenDataset, rows: list[list[Span]], shape: tuple[int, int], document_mask: bool, mask_prompt: bool
) -> Iterator[Batch]:
    for first in range(0, len(rows), shape[0]):
        batch = _padding(shape, segment_ids=document_mask, weights=True)
        for row, spans in enumerate(rows[first : first + shape[0]]):
            _fill(batch, row, data, spans, mask_prompt)
        yield batch


def _whole_documents(data: TokenDataset, length: int) -> list[list[Span]]:
    """Rows of at most `length` + 1 tokens: documents in order, a longer one cropped, those without targets left out."""
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
