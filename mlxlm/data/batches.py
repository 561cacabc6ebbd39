"""Batches of token windows: an endless shuffled order for training, one exact pass for validation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from mlxlm.data.dataset import TokenDataset
from mlxlm.errors import DataError


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
    """Shuffled windows of `sequence_length` + 1 tokens, epoch after epoch, without end.

    Batch `index` is a pure function of (data, batch_size, sequence_length, seed, index): a resumed run needs
    no state but its step. Windows of one epoch overlap in a single token, the last target of one being the
    first input of the next, so that no target comes twice in an epoch. Each epoch cuts at other places: its
    windows start at a random offset below `sequence_length`; at most 2 `sequence_length` tokens are left out
    at the ends.

    Attributes:
        windows: number of windows in an epoch.

    Raises DataError if the data has fewer than `sequence_length` + 1 tokens.
    """

    def __init__(self, data: TokenDataset, batch_size: int, sequence_length: int, seed: int):
        if len(data) < sequence_length + 1:
            at_most = len(data) - 1
            raise DataError(
                f"the {data.split} data has {len(data)} tokens, too few for sequences of {sequence_length}",
                f"a sequence length of {at_most} or less, or more text" if at_most > 0 else "more text",
            )
        self._data = data
        self._batch_size = batch_size
        self._length = sequence_length
        self._seed = seed
        self.windows = max(1, (len(data) - sequence_length) // sequence_length)
        self._offsets = min(sequence_length, len(data) - self.windows * sequence_length)

    def batch(self, index: int) -> Batch:
        """Batch number `index`, of `batch_size` rows."""
        rows = np.empty((self._batch_size, self._length + 1), np.int32)
        first = index * self._batch_size
        row = 0
        while row < self._batch_size:
            epoch, place = divmod(first + row, self.windows)
            places = np.arange(place, min(self.windows, place + self._batch_size - row))
            for start in self._starts(epoch, places):
                rows[row] = self._data.slice(start, start + self._length + 1)
                row += 1
        return Batch(rows)

    def epoch_of(self, index: int) -> float:
        """How many epochs have been seen before batch `index`."""
        return index * self._batch_size / self.windows

    def _starts(self, epoch: int, places: np.ndarray) -> list[int]:
        keys = np.random.SeedSequence([self._seed, epoch]).generate_state(_ROUNDS + 1, np.uint64)
        offset = int(keys[-1]) % self._offsets
        return [offset + int(w) * self._length for w in _permuted(places, self.windows, keys[:_ROUNDS])]


_ROUNDS = 4


def _permuted(places: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """A keyed pseudo-random permutation of range(n), evaluated at `places` only: no table of n entries.

    A balanced Feistel network over the next even power of two, applied again to values that fall outside
    (cycle walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002).
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    values = places.astype(np.uint64)
    outside = np.ones(len(values), bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        values[outside] = left << half | right
        outside = values >= n
    return values


def _mixed(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea, Flood, 2014): every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


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
            f"the {data.split} data has {len(data)} tokens, too few to predict any",
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
