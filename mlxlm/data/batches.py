"""Batches of token windows: an endless shuffled order for training, one exact pass for validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mlxlm.data.dataset import TokenDataset
from mlxlm.data.mixture import Mixture
from mlxlm.data.packing import BestFit, Concatenated, Packing
from mlxlm.errors import DataError

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
    the data that has a weight of its own gives its share of the rows (see `Mixture`), and goes through its own epochs.
    With `ranks`, several take turns at the batches of one: batch i of rank r is batch i · ranks + r of a single one.

    packing: "concatenate" (windows of all text in a row) or "best-fit" (rows begin with a document, see `BestFit`).
    document_mask: batches say which document each token is of.
    answers_only: batches weigh what is to be learned of conversations: see `TokenDataset.learned`.

    Attributes:
        rows: how many rows an epoch of all parts has.
        cropped: the share of the drawn text that an epoch leaves out, because it doesn't fit into rows.

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
        self._rank, self._ranks = rank, ranks
        self._parts = data.parts
        pack = PACKINGS[packing]
        self._packings: list[Packing] = [
            pack(part.data, sequence_length + 1, seed, source) for source, part in enumerate(self._parts)
        ]
        self._mixture = Mixture([part.weight for part in self._parts], seed)
        self.rows = sum(p.rows for p in self._packings)
        shares = self._mixture.counts / self._mixture.counts.sum()
        self.cropped = float(sum(share * p.cropped for share, p in zip(shares, self._packings, strict=True)))

    def batch(self, index: int) -> Batch:
        """Batch number `index`, of `batch_size` rows."""
        shape = self._batch_size, self._length
        tokens = np.empty((shape[0], shape[1] + 1), np.int32)
        segments = np.empty(shape, np.int32) if self._document_mask else None
        weights = np.empty(shape, np.float32) if self._answers_only else None
        first = (index * self._ranks + self._rank) * self._batch_size
        for i in range(self._batch_size):
            source, row = self._mixture.place(first + i)
            data, spans = self._parts[source].data, self._packings[source].spans(row)
            tokens[i] = np.concatenate([data.slice(*span) for span in spans])
            if segments is not None:
                segments[i] = _numbered([data.segments(*span) for span in spans])[:-1]
            if weights is not None:
                weights[i] = np.concatenate([data.learned(*span) for span in spans])[1:]
        return Batch(tokens, segments, weights)

    def epochs(self, index: int) -> dict[str, float]:
        """How many epochs of each part have been seen before batch `index`."""
        seen = self._mixture.rows_before(index * self._ranks * self._batch_size)
        return {part.name: int(n) / p.rows for part, p, n in zip(self._parts, self._packings, seen, strict=True)}

    def epoch_of(self, index: int) -> float:
        """How many epochs have been seen before batch `index`: rows of all parts, by the rows that they have."""
        return index * self._ranks * self._batch_size / self.rows


def _numbered(segments: list[np.ndarray]) -> np.ndarray:
    """Documents numbered along a row: each span begins another."""
    numbers, first = [], 0
    for of_span in segments:
        numbers.append(of_span + first)
        first = numbers[-1][-1] + 1
    return np.concatenate(numbers)


def validation_batches(
    data: TokenDataset, batch_size: int, sequence_length: int, max_tokens: int | None = None
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """One pass in order: (tokens int32 [B, T+1], mask float32 [B, T]), every batch of the same shape.

    Every target (token 1, 2, ... of the data) has mask 1 exactly once; the padding of the last batch is
    token 0 with mask 0. With `max_tokens`, only as many windows as hold so many targets (at least one),
    spread evenly over the data.

    Raises DataError if the data has fewer than two tokens.
    """
    if len(data) < 2:
        raise DataError(
            f"{data.name} has {len(data)} tokens, too few to predict any",
            "more text, or a larger validation fraction",
        )
    windows = -(-(len(data) - 1) // sequence_length)
    count = windows if max_tokens is None else max(1, min(windows, max_tokens // sequence_length))
    chosen = [i * windows // count for i in range(count)]
    return _batched_windows(data, batch_size, sequence_length, chosen)


def _batched_windows(
    data: TokenDataset, batch_size: int, length: int, windows: list[int]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for first in range(0, len(windows), batch_size):
        tokens = np.zeros((batch_size, length + 1), np.int32)
        mask = np.zeros((batch_size, length), np.float32)
        for row, window in enumerate(windows[first : first + batch_size]):
            start = window * length
            n = min(length, len(data) - 1 - start)
            tokens[row, : n + 1] = data.slice(start, start + n + 1)
            mask[row, :n] = 1
        yield tokens, mask
