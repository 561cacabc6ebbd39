"""Batches of token windows: an endless shuffled order for training, one exact pass for validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mlxlm.data.dataset import TokenDataset
from mlxlm.data.mixture import Mixture
from mlxlm.data.packing import BestFit, Concatenated, Packing, Span
from mlxlm.utils.errors import DataError

PACKINGS = {"concatenate": Concatenated, "best-fit": BestFit}


class Batch(NamedTuple):
    """What one forward pass of training is given.

    tokens: int32 [B, T + 1]: inputs are [:, :-1], targets [:, 1:].
    segments: int32 [B, T], the number of the document that each input is of, rising along a row: attention stays
        within a document. None: a row is one text.
    weights: float32 [B, T], what each target counts (0: it isn't learned). None: each counts 1.
    """

    tokens: np.ndarray
    segments: np.ndarray | None = None
    weights: np.ndarray | None = None


class TrainBatches:
    """Batches of rows of `sequence_length` + 1 tokens, epoch after epoch, without end.

    Batch `index` is a pure function of the arguments and `index`: a resumed run needs no state but its step. A part of
    the data that has a weight of its own gives its share of the tokens (see `Mixture`), and goes through its own
    epochs. With `ranks`, several take turns at the batches of one: batch i of rank r is batch i · ranks + r of a
    single one.

    packing: "concatenate" (windows of all text in a row) or "best-fit" (rows of whole documents, padded: see
        `BestFit`). Padding is token 0, of no document, weighs 0 and comes last in a row.
    document_mask: batches say which document each token is of.
    answers_only: batches weigh what is to be learned of conversations: see `TokenDataset.learned`.

    Attributes:
        rows: how many rows an epoch of all parts has.
        cropped: the share of the drawn text that an epoch leaves out, because it doesn't fit into rows.
        padding: the share of the rows that is padding.

    Raises DataError if the data, or a part of it, doesn't fill one row.
    """

    def __init__(
        self,
        data: TokenDataset,
        batch_size: int,
        sequence_length: int,
        seed: int,
        *,
        packing: str = "concatenate",
        document_mask: bool = False,
        answers_only: bool = False,
        rank: int = 0,
        ranks: int = 1,
    ):
        self._batch_size, self._length = batch_size, sequence_length
        self._document_mask, self._answers_only = document_mask, answers_only
        self._weighted = answers_only or packing == "best-fit"
        self._rank, self._ranks = rank, ranks
        self._parts = data.parts
        pack = PACKINGS[packing]
        self._packings: list[Packing] = [
            pack(part.data, sequence_length + 1, seed, source) for source, part in enumerate(self._parts)
        ]
        # A part whose rows have more padding takes more rows for the same share of the tokens.
        weights = [part.weight / (1 - p.padding) for part, p in zip(self._parts, self._packings, strict=True)]
        self._mixture = Mixture(weights, seed)
        self.rows = sum(p.rows for p in self._packings)
        shares = self._mixture.counts / self._mixture.counts.sum()
        self.cropped = float(sum(share * p.cropped for share, p in zip(shares, self._packings, strict=True)))
        self.padding = float(sum(share * p.padding for share, p in zip(shares, self._packings, strict=True)))

    def batch(self, index: int) -> Batch:
        """Batch number `index`, of `batch_size` rows. Raises DataError where it has nothing to be learned."""
        shape = self._batch_size, self._length
        batch = _padding(shape, segments=self._document_mask, weights=self._weighted)
        first = (index * self._ranks + self._rank) * self._batch_size
        for i in range(self._batch_size):
            source, row = self._mixture.place(first + i)
            _fill(batch, i, self._parts[source].data, self._packings[source].spans(row), self._answers_only)
        if batch.weights is not None and not batch.weights.any():
            hint = "a longer sequence length, or conversations with messages of the assistant"
            raise DataError(f"batch {index} of {self._parts[0].data.name} has nothing to be learned", hint)
        return batch

    def epochs(self, index: int) -> dict[str, float]:
        """How many epochs of each part have been seen before batch `index`."""
        seen = self._mixture.rows_before(index * self._ranks * self._batch_size)
        return {part.name: int(n) / p.rows for part, p, n in zip(self._parts, self._packings, seen, strict=True)}

    def epoch_of(self, index: int) -> float:
        """How many epochs have been seen before batch `index`: rows of all parts, by the rows that they have."""
        return index * self._ranks * self._batch_size / self.rows


def _padding(shape: tuple[int, int], *, segments: bool, weights: bool) -> Batch:
    """A batch of nothing but padding."""
    return Batch(
        np.zeros((shape[0], shape[1] + 1), np.int32),
        np.zeros(shape, np.int32) if segments else None,
        np.zeros(shape, np.float32) if weights else None,
    )


def _fill(batch: Batch, row: int, data: TokenDataset, spans: list[Span], answers_only: bool) -> None:
    """Write what `spans` have into a row of padding."""
    ranges = [(span.start, span.stop) for span in spans]
    n = sum(stop - start for start, stop in ranges)
    batch.tokens[row, :n] = np.concatenate([data.slice(*span) for span in ranges])
    if batch.weights is not None:
        learned = [np.array(data.learned(*s)) if answers_only else np.ones(s[1] - s[0], np.uint8) for s in ranges]
        for span, of_span in zip(spans, learned, strict=True):
            if span.continues:
                of_span[0] = 0
        batch.weights[row, : n - 1] = np.concatenate(learned)[1:]
    if batch.segments is not None:
        numbers = _numbered([data.segments(*span) for span in ranges])
        batch.segments[row] = numbers[-1] + 1  # padding is of no document
        batch.segments[row, :n] = numbers[: batch.segments.shape[1]]


def _numbered(segments: list[np.ndarray]) -> np.ndarray:
    """Documents numbered along a row: each span begins another."""
    numbers, first = [], 0
    for of_span in segments:
        numbers.append(of_span + first)
        first = numbers[-1][-1] + 1
    return np.concatenate(numbers)


def validation_batches(
    data: TokenDataset,
    batch_size: int,
    sequence_length: int,
    max_tokens: int | None = None,
    *,
    document_mask: bool = False,
    answers_only: bool = False,
) -> Iterator[Batch]:
    """One pass in order, every batch of the same shape, padded with tokens 0 of weight 0.

    Rows are windows: every target (token 1, 2, ... of the data) has weight 1 exactly once. With `answers_only` they
    are conversations, as many in a row as fit whole, each from its start and cropped to a row; what counts is what is
    to be learned, see `TokenDataset.learned`, and those without it are left out. With `max_tokens`, only as many rows
    as hold so many targets (at least one), spread evenly over the data. `document_mask`: see `TrainBatches`.

    Raises DataError if the data has fewer than two tokens, or none in it to be learned within a row.
    """
    if len(data) < 2:
        raise DataError(
            f"{data.name} has {len(data)} tokens, too few to predict any",
            "more text, or a larger validation fraction",
        )
    rows = _whole_documents(data, sequence_length) if answers_only else range(0, len(data) - 1, sequence_length)
    if not rows:
        problem = f"{data.name} has no answers that begin in rows of {sequence_length} tokens"
        raise DataError(problem, "a longer sequence length, or conversations with messages of the assistant")
    count = len(rows) if max_tokens is None else max(1, min(len(rows), max_tokens // sequence_length))
    chosen = [rows[i * len(rows) // count] for i in range(count)]
    if not answers_only:
        chosen = [[Span(start, min(start + sequence_length + 1, len(data)))] for start in chosen]
    return _padded(data, chosen, (batch_size, sequence_length), document_mask, answers_only)


def _padded(
    data: TokenDataset, rows: list[list[Span]], shape: tuple[int, int], document_mask: bool, answers_only: bool
) -> Iterator[Batch]:
    for first in range(0, len(rows), shape[0]):
        batch = _padding(shape, segments=document_mask, weights=True)
        for row, spans in enumerate(rows[first : first + shape[0]]):
            _fill(batch, row, data, spans, answers_only)
        yield batch


def _whole_documents(data: TokenDataset, length: int) -> list[list[Span]]:
    """Rows of at most `length` + 1 tokens: documents in order, a longer one cropped, those without targets left out."""
    rows: list[list[Span]] = []
    room = 0
    starts, stops = data.starts.bounds(np.arange(len(data.starts)))
    for start, stop in zip(starts.tolist(), np.minimum(stops, starts + length + 1).tolist(), strict=True):
        if not data.learned(start, stop)[1:].any():
            continue
        if stop - start > room:
            rows.append([])
            room = length + 1
        rows[-1].append(Span(start, stop))
        room -= stop - start
    return rows
